"""Mistakes that `luthier check` finds before a CTC model is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

# name: (texts, sections, what is said)
PLANTED: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "more text than frames": (["hello world how are you " * 4] * 4 + ["a", "b"], {}, "4 too_short_for_ctc"),
    "letters that the model does not know": (["你好", "再见", "世界", "谢谢"], {}, "4 "),
    "features of a model that hears samples": (
        ["a", "b", "c"], {"data": {"cache": {"folder": "cache"}}}, "hears samples",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_found(
    name: str, wav2vec2, recipes, tone, write_manifest, failures, tmp_path: Path
) -> None:
    texts, sections, said = PLANTED[name]
    file = write_manifest(tmp_path, [tone(at, 0.6) for at in range(len(texts))], [{"text": text} for text in texts])
    make = recipes(file, tmp_path / "run", {"kind": "asr.ctc"}, {"freeze_feature_encoder": False})
    data = {"train": str(file), "workers": 0, **sections.get("data", {})}
    found = failures(lambda: make(wav2vec2, data=data))
    assert any(said in one for one in found), found
    assert len(found) == 1, "one mistake is one failure"
