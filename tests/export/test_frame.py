"""What every export promises, whatever its format: whole or absent, compared, told, and nothing secret."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from luthier.common import licenses
from luthier.common.cli import main
from luthier.common.errors import ExportError, LuthierError, RecipeError
from luthier.common.exportable import Output
from luthier.export import card, formats, hub, parity
from luthier.export.run import export
from luthier.export.targets import merged as merged_target

README = Path(__file__).parents[2] / "README.md"


def put(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    monkeypatch.setattr(merged_target, name, value)


# ------------------------------------------------------------------------------------------------ whole or absent


def test_an_artifact_is_whole_and_says_what_it_is(checkpoint_of, tmp_path: Path) -> None:
    checkpoint = checkpoint_of("llm.sft")
    place = export(checkpoint, "merged", tmp_path / "out", inputs=1)
    facts = json.loads((place / "artifact.json").read_text())
    files = {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}
    assert set(facts["files"]) == files - {"artifact.json"}
    assert (facts["kind"], facts["format"], facts["dtype"]) == ("llm.sft", "merged", "float32")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(ExportError, match="something already"):
        export(checkpoint, "merged", place, inputs=1)


def test_what_fails_on_the_way_leaves_nothing(checkpoint_of, tmp_path: Path, monkeypatch) -> None:
    def write(source: Any, directory: Path, dtype: str) -> None:
        (directory / "half").write_text("x")
        raise ExportError("no")

    put(monkeypatch, "write", write)
    with pytest.raises(ExportError, match="no"):
        export(checkpoint_of("llm.sft"), "merged", tmp_path / "out", inputs=1)
    assert not list(tmp_path.iterdir())


def test_what_is_not_the_model_is_set_aside_with_exit_code_2(
    checkpoint_of, tmp_path: Path, monkeypatch, capsys
) -> None:
    """An artifact of which one weight is wrong."""
    true = merged_target.write

    def write(source: Any, directory: Path, dtype: str) -> None:
        from safetensors.torch import load_file, save_file

        true(source, directory, dtype)
        tensors = load_file(directory / "model.safetensors")
        tensors["model.norm.weight"] *= 1.5
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    put(monkeypatch, "write", write)
    with pytest.raises(SystemExit) as ended:
        main(["export", str(checkpoint_of("llm.sft")), "--to", "merged", "--output", str(tmp_path / "out")])
    assert ended.value.code == 2
    assert "numbers differ" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["out.unusable"]
    report = json.loads((tmp_path / "out.unusable" / "parity.json").read_text())
    assert report["usable"] is False
    assert report["largest_difference"] > report["allowed_difference"]
    with pytest.raises(ExportError, match="passed its comparison"):
        hub.push(tmp_path / "out.unusable", "me/model")


def test_what_can_t_be_is_refused_before_anything_is_written(checkpoint_of, tmp_path: Path, monkeypatch) -> None:
    checkpoint, out = checkpoint_of("llm.sft"), tmp_path / "out"
    with pytest.raises(ExportError, match="no such format") as told:
        export(checkpoint, "ctranslate2", out)
    assert "merged" in str(told.value)
    with pytest.raises(ExportError, match="no such numbers"):
        export(checkpoint, "merged", out, dtype="int8")
    with pytest.raises(ExportError, match="no adapter"):
        export(checkpoint, "adapter", out, inputs=1)
    with pytest.raises(RecipeError, match="can't change"):
        export(checkpoint, "merged", out, ["model.path=other"])
    monkeypatch.setattr(formats, "find_spec", lambda name: None)
    with pytest.raises(LuthierError, match=r"luthier\[export\]"):
        formats.find("ctranslate2", "speech_seq2seq").load()
    assert not list(tmp_path.iterdir())


def test_only_what_is_asked_for_is_uploaded(exported, monkeypatch) -> None:
    import huggingface_hub

    done: list[tuple[str, Any]] = []
    api = SimpleNamespace(
        create_repo=lambda repository, **options: done.append(("create", options)) or "address",
        upload_folder=lambda **options: done.append(("upload", options)),
    )
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    place, _ = exported("llm.sft", "merged")
    assert not done
    assert hub.push(place, "me/model") == "address"
    assert done[0] == ("create", {"private": True, "exist_ok": True})
    assert done[1][1]["folder_path"] == str(place)


# ------------------------------------------------------------------------------------------------ comparing


def test_differences_are_those_of_the_numbers() -> None:
    expected = [Output(np.array([1.0, -4.0]), "a"), Output(np.array([[2.0]]), "b")]
    found = [Output(np.array([1.5, -4.0]), "a"), Output(np.array([[1.0]]), "c")]
    told = parity.compare(expected, found)
    assert (told.inputs, told.largest, told.mean, told.scale, told.same_text) == (2, 1.0, 0.5, 4.0, 1)


def test_steps_are_compared_up_to_the_first_other_choice() -> None:
    """The step that chose otherwise is compared, those after it follow another text."""
    one = Output(np.array([[1.0], [2.0], [3.0]]), "x", (5, 6))
    other = Output(np.array([[1.0], [2.5], [90.0]]), "y", (5, 7))
    assert parity.compare([one], [other]).largest == 0.5


@pytest.mark.parametrize(
    ("largest", "dtype", "after", "same", "fault"),
    [
        (0.0, "float32", 1.0, 4, ""),
        (10 * 2.0**-13, "float32", 1.0, 4, ""),
        (11 * 2.0**-13, "float32", 1.0, 4, "numbers differ"),
        (float("nan"), "float32", 1.0, 4, "numbers differ"),
        (0.0, "float32", 1.002, 4, "loss goes"),
        (0.0, "float32", 0.5, 4, ""),
        (0.0, "float32", 1.0, 3, "texts differ"),
        (0.0, "int8", 1.0, 3, ""),
        (0.0, "int8", 1.029, 4, ""),
        (0.0, "int8", 1.031, 4, "loss goes"),
        (0.0, "int8", float("nan"), 4, "loss goes"),
    ],
)
def test_what_is_above_its_tolerance(largest: float, dtype: str, after: float, same: int, fault: str) -> None:
    told = parity.Compared(4, largest, 0.0, 10.0, same)
    report = parity.Report("f", dtype, "", "validation", told, {"loss": 1.0}, {"loss": after}, {"loss": "min"}, "loss")
    assert (fault in "; ".join(report.faults())) if fault else not report.faults()


# ------------------------------------------------------------------------------------------------ the card


def test_the_card_says_what_it_is_and_no_secret(exported, checkpoint_of, base_of) -> None:
    place, _ = exported("llm.sft", "merged")
    text = (place / "README.md").read_text()
    known = licenses.head(text)
    assert known["library_name"] == "transformers"
    assert known["pipeline_tag"] == "text-generation"
    assert "license" not in known, "none is stated, and none is made up"
    run = json.loads((checkpoint_of("llm.sft") / "run.json").read_text())
    digests = next(iter(run["data"]["train"]["sha256"].values()))
    for part in (digests, run["model"]["sha256"], run["versions"]["torch"], "vllm serve PATH", "unknown", "| loss |"):
        assert part in text, part
    assert str(Path(base_of("llm")).parent) not in text, "no folder of this machine"
    assert str(place.parent) not in text


def test_secrets_are_left_out() -> None:
    told = card.clean(
        {
            "hf_token": "abc",
            "data": {"path": "s3://me:pass@host/x", "api_key": "k"},
            "max_new_tokens": 5,
            "list": ["/a/b"],
        }
    )
    assert told == {
        "hf_token": "(left out)", "data": {"path": "s3://host/x", "api_key": "(left out)"}, "max_new_tokens": 5,
        "list": ["b"],
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ the command line


def test_the_table_in_the_readme_is_that_of_the_code() -> None:
    rows = [line for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("| `--to")]
    assert rows == formats.rows()


def test_the_formats_are_known_to_every_kind() -> None:
    """A form in the table belongs to a kind, and every module of a target has what is called."""
    for target in formats.TARGETS:
        assert target.form in card.PIPELINES
        assert target.dtypes
        assert set(target.dtypes) <= set(formats.TOLERANCE) & set(formats.SLACK)


def test_help_does_not_wait_for_heavy_libraries() -> None:
    import subprocess
    import sys

    code = "import sys, luthier.export.verbs as v; print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"
