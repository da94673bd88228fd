"""Samples on disk."""

from __future__ import annotations

import json
from pathlib import Path

from luthier.common.evaluation.kept import keep


def test_pictures_become_files_that_the_json_names(tmp_path: Path) -> None:
    samples = [{"prompt": "é", "score": 1.5}, {"prompt": "b", "picture": b"\x89PNG"}]
    keep(samples, tmp_path / "samples", "step-00000003")
    text = (tmp_path / "samples" / "step-00000003.json").read_text(encoding="utf-8")
    assert json.loads(text) == [samples[0], {"prompt": "b", "picture": "step-00000003-1.png"}]
    assert (tmp_path / "samples" / "step-00000003-1.png").read_bytes() == b"\x89PNG"
    assert sorted(file.name for file in (tmp_path / "samples").iterdir()) == [
        "step-00000003-1.png",
        "step-00000003.json",
    ]
    keep(samples[:1], tmp_path / "samples", "step-00000003")
    assert json.loads((tmp_path / "samples" / "step-00000003.json").read_text(encoding="utf-8")) == samples[:1]
