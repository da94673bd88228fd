"""The registry: what an artifact says is kept, and a stage has to be earned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from luthier.common.cli import main
from luthier.common.console import console
from luthier.common.errors import ExportError
from luthier.export import artifact
from luthier.export.registry import Registry

mlflow = pytest.importorskip("mlflow")


def make(folder: Path, wer: float | None = 0.25, faults: tuple[str, ...] = (), usable: bool | None = True) -> Path:
    """An artifact as `luthier export` leaves it, whose weights are a few letters."""
    folder.mkdir()
    (folder / "model.onnx").write_text(f"weights {wer}")
    metrics = {} if wer is None else {"wer": {"trained": wer, "artifact": wer, "better": "min"}}
    parity = {"usable": not faults, "faults": faults, "deciding_metric": "wer", "metrics": metrics,
              "largest_difference": 1e-6}  # fmt: skip
    (folder / "parity.json").write_text(json.dumps(parity))
    facts = {
        "kind": "asr.ctc", "form": "ctc", "format": "onnx", "dtype": "float32", "checkpoint": {"name": "step-1"},
        "base": {"name": "someone/base", "sha256": "ab" * 32}, "data": {"train": {"rows.jsonl": "cd" * 32}},
        "metrics": {"wer": wer, "slices": {"speaker": {"a": {"wer": 0.5, "count": 3}}}},
        "licenses": {"stated": {"someone/base": "mit"}, "lines": ["To be named."], "usable": usable, "output": "mit"},
    }  # fmt: skip
    artifact.seal(folder, facts)
    return folder


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with MLflow's tables, whose making takes seconds."""
    file = tmp_path_factory.mktemp("registry") / "empty.db"
    Registry(f"sqlite:///{file}").versions()
    return file


@pytest.fixture
def uri(empty: Path, tmp_path: Path) -> str:
    """A registry of its own."""
    (tmp_path / "registry.db").write_bytes(empty.read_bytes())
    return f"sqlite:///{tmp_path / 'registry.db'}"


@pytest.fixture
def registry(uri: str) -> Registry:
    return Registry(uri)


def test_what_an_artifact_says_is_kept(registry: Registry, tmp_path: Path) -> None:
    place = make(tmp_path / "a")
    made = registry.add(place, "speech")
    assert (made.name, made.number, made.stage) == ("speech", 1, "candidate")
    assert made.source == str(place)
    assert made.sha256 == artifact.sha256(place / "artifact.json")
    assert made.facts["base"] == {"name": "someone/base", "sha256": "ab" * 32}
    assert made.facts["data"] == {"train": {"rows.jsonl": "cd" * 32}}
    assert made.facts["licenses"]["output"] == "mit"
    assert made.metrics == {"wer": 0.25}
    assert made.slices == {"speaker/a/wer": 0.5, "speaker/a/count": 3.0}
    again = registry.add(make(tmp_path / "b", 0.2), "speech")
    assert again.number == 2
    assert [(one.name, one.number) for one in registry.versions()] == [("speech", 1), ("speech", 2)]
    with pytest.raises(ExportError, match="no such version"):
        registry.version("speech", 3)


def test_what_mlflow_refuses_is_told(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ExportError, match="refuses"):
        registry.add(make(tmp_path / "a"), "a:b")
    with pytest.raises(ExportError, match="refuses"):
        Registry("nowhere://x")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    for ask in (lambda nobody: nobody.add(tmp_path / "a", "speech"), lambda nobody: nobody.version("speech", 1)):
        with pytest.raises(ExportError, match="refuses") as told:
            ask(Registry("http://me:pass@127.0.0.1:9"))
        assert "pass" not in str(told.value)
    registry.client.create_registered_model("other")
    registry.client.create_model_version("other", tmp_path.as_uri())
    assert not registry.versions("other")
    with pytest.raises(ExportError, match="not registered by"):
        registry.promote("other", 1, "canary")


def test_a_version_goes_up_step_by_step_and_takes_the_place_of_the_last(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        registry.add(make(tmp_path / name), "speech")
    with pytest.raises(ExportError, match="can't become") as told:
        registry.promote("speech", 1, "production")
    assert "canary or archived" in str(told.value)
    assert registry.promote("speech", 1, "canary").stage == "canary"
    assert registry.promote("speech", 1, "production").stage == "production"
    assert registry.client.get_model_version_by_alias("speech", "production").version in (1, "1")
    registry.promote("speech", 2, "canary")
    held: list[str] = []
    tag = registry.client.set_model_version_tag
    monkeypatch.setattr(registry.client, "set_model_version_tag", lambda *given: (
        held.append(str(registry.client.get_model_version_by_alias("speech", "production").version)), tag(*given)
    ))  # fmt: skip
    registry.promote("speech", 2, "production")
    assert held == ["2", "2"], "one serves at any time"
    assert [one.stage for one in registry.versions("speech")] == ["archived", "production"]
    aliases = dict(registry.client.get_registered_model("speech").aliases)
    assert {name: str(number) for name, number in aliases.items()} == {"production": "2"}
    with pytest.raises(ExportError, match="can't become"):
        registry.promote("speech", 1, "canary")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"faults": ("numbers differ by 3",)}, "numbers differ by 3"),
        ({"wer": None}, "no evaluation"),
        ({"usable": False}, "To be named"),
    ],
)
def test_what_has_not_earned_it_is_not_promoted(
    change: dict[str, Any], reason: str, registry: Registry, tmp_path: Path
) -> None:
    registry.add(make(tmp_path / "a", **change), "speech")
    with pytest.raises(ExportError, match="may not be served") as told:
        registry.promote("speech", 1, "canary")
    assert reason in str(told.value)
    assert registry.version("speech", 1).stage == "candidate"
    assert registry.promote("speech", 1, "archived").stage == "archived"


def test_an_artifact_without_a_report_or_that_was_changed_is_not_promoted(registry: Registry, tmp_path: Path) -> None:
    bare = make(tmp_path / "bare")
    (bare / "parity.json").unlink()
    facts = json.loads((bare / "artifact.json").read_text())
    del facts["files"]
    (bare / "artifact.json").unlink()
    artifact.seal(bare, facts)
    registry.add(bare, "speech")
    with pytest.raises(ExportError, match="no parity report"):
        registry.promote("speech", 1, "canary")
    changed = make(tmp_path / "changed")
    registry.add(changed, "speech")
    (changed / "model.onnx").write_text("other weights")
    with pytest.raises(ExportError, match=r"model\.onnx"):
        registry.promote("speech", 2, "canary")
    with pytest.raises(ExportError, match=r"model\.onnx"):
        registry.add(changed, "speech")
    with pytest.raises(ExportError, match="no artifact"):
        registry.add(tmp_path, "speech")


def test_the_command_line(uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", uri)
    monkeypatch.setattr(console, "width", 200)

    def run(*words: object, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["registry", *map(str, words)])
        assert ended.value.code == code
        told = capsys.readouterr()
        return told.err if code else told.out

    assert "speech 1: candidate" in run("add", make(tmp_path / "a", 0.25), "speech")
    assert "speech 2: candidate" in run("add", make(tmp_path / "b", 0.20), "speech")
    assert "can't become" in run("promote", "speech", 1, "--to", "production", code=2)
    assert "speech 1: canary" in run("promote", "speech", 1, "--to", "canary")
    listed = run("list")
    assert "canary" in listed
    assert "wer 0.2000" in listed
    shown = run("show", "speech", 1)
    for part in ("someone/base", "abab", "rows.jsonl cdcdcd", "speaker/a/wer", "0.5000", "mit", "nothing"):
        assert part in shown, part
    assert "-0.0500" in run("compare", "speech", 1, 2)
