"""Mining as a whole: beside sentence-transformers' own, killed at every stage, and on the command line."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from luthier.common import cli
from luthier.modalities.embedding import roles
from luthier.modalities.embedding.mine import choose, models, run
from luthier.modalities.embedding.mine.settings import Settings
from luthier.modalities.embedding.mine.stage import Stage

SettingsOf = Callable[..., Settings]
Mined = Callable[[Settings], list[dict[str, Any]]]

# ------------------------------------------------------------------------------------------------ what is written


def test_rows_keep_their_columns_and_are_read_again_as_groups_with_a_teacher(
    world, cross_encoder: Path, settings_of: SettingsOf, mined: Mined
) -> None:
    others = {"negative": "old", "score": 0.5, "text": "t", "label": 1, "topic": {"a": ["é"]}}
    rows = [{"title": row["anchor"], "body": row["positive"], "id": row["id"], **others} for row in world]
    settings = settings_of(rows=rows, rescore=str(cross_encoder), roles={"anchor": "title", "positive": "body"})
    found = mined(settings)
    assert [row["id"] for row in found] == [row["id"] for row in world]
    # `negative` is of the layout that is written, and `text` and `label` together are another one
    kept = {"id", "topic", "score"}
    assert all(row.keys() == kept | {"anchor", "positive", "negatives", "scores"} for row in found)
    assert found[0]["topic"] == {"a": ["é"]}
    items = list(roles.items(str(settings.output), None, "mined", {}, 0))
    assert all(item.shape == "groups" for item in items)  # type: ignore[union-attr]
    assert [len(item.scores) for item in items] == [1 + len(row["negatives"]) for row in found]  # type: ignore[union-attr]


def test_no_negative_is_a_positive_of_its_query(world, settings_of: SettingsOf, mined: Mined) -> None:
    known: dict[str, set[str]] = {}
    for row in world:
        known.setdefault(row["anchor"], set()).add(row["positive"])
    assert max(map(len, known.values())) == 3
    found = mined(settings_of(method="both"))
    assert len(found) == len(world)
    assert all(len(set(row["negatives"]) - known[row["anchor"]] - {row["anchor"]}) == 4 for row in found)


def test_without_a_cross_encoder_there_are_no_scores_and_several_positives_are_several_rows(
    tmp_path: Path, settings_of: SettingsOf, mined: Mined
) -> None:
    rows = [
        {"query": "ask q1", "pos": ["tell d1", "tell d2"], "neg": ["tell d3"]},
        {"query": "ask q2", "pos": "tell d4"},
    ]
    found = mined(settings_of(rows=rows, method="bm25", negatives=2, model=None))
    assert found == [
        {"anchor": "ask q1", "positive": "tell d1", "negatives": []},  # no word is shared
        {"anchor": "ask q1", "positive": "tell d2", "negatives": []},
        {"anchor": "ask q2", "positive": "tell d4", "negatives": []},
    ]


def test_similarities_are_written_where_they_are_asked_for(
    sentence_model: Path, settings_of: SettingsOf, mined: Mined
) -> None:
    from sentence_transformers import SentenceTransformer

    model: Any = SentenceTransformer(str(sentence_model), device="cpu")
    for row in mined(settings_of(negatives=3, scores=True))[:5]:
        query = model.encode_query(row["anchor"])
        near = model.similarity(query, model.encode_document([row["positive"], *row["negatives"]]))[0]
        assert row["scores"] == pytest.approx(near.tolist(), abs=2e-6)


def test_the_report_adds_up(world, tmp_path: Path, rows_of, settings_of: SettingsOf) -> None:
    more = rows_of(tmp_path / "more.jsonl", [{"text": "tell d0"}, {"text": 3}, {"text": world[3]["anchor"].upper()}])
    settings = settings_of(corpus=str(more), last=10, first=3, margin=0.01)
    report = run.mine(settings)
    rows = [json.loads(line) for line in settings.output.read_text().splitlines()]
    assert report.rows == len(rows) == len(world)
    assert report.negatives == sum(len(row["negatives"]) for row in rows)
    assert report.short == sum(len(row["negatives"]) < 4 for row in rows)
    assert report.bad == {"not_text": 1}
    assert report.queries == len({row["anchor"] for row in world})
    assert report.documents == len(world) + 2
    assert report.dropped["window"] == 2 * report.queries
    assert report.dropped["margin"] > 0
    assert json.loads((settings.parts / "report.json").read_text()) == asdict(report)


def test_texts_are_embedded_with_the_saved_prompts_or_those_given(
    monkeypatch: pytest.MonkeyPatch, settings_of: SettingsOf
) -> None:
    from sentence_transformers import SentenceTransformer

    seen: dict[str, set[str | None]] = {"query": set(), "document": set()}
    before = SentenceTransformer.encode

    def encode(self: Any, inputs: Any, **options: Any) -> Any:
        seen[options["task"]].add(self._resolve_prompt(options["prompt"], options["prompt_name"]))
        return before(self, inputs, **options)

    monkeypatch.setattr(SentenceTransformer, "encode", encode)
    run.mine(settings_of())
    assert seen == {"query": {"ask : "}, "document": {"tell : "}}
    seen["query"], seen["document"] = set(), set()
    run.mine(settings_of(query_prompt="q1 "))
    assert seen == {"query": {"q1 "}, "document": set()}  # the documents' embeddings are used again


# ------------------------------------------------------------------------------------------------ in parts


def output(settings: Settings) -> bytes:
    run.mine(settings)
    return settings.output.read_bytes()


@pytest.mark.parametrize("changes", [{"method": "both"}, {"sample": "random", "method": "dense"}])
def test_the_output_does_not_depend_on_the_shards(settings_of: SettingsOf, changes: dict[str, Any]) -> None:
    settings = settings_of(**changes)
    whole = output(replace(settings, shard=1000))
    for shard in (7, 25):
        assert output(replace(settings, output=settings.output.with_name(f"{shard}"), shard=shard)) == whole


class Interrupted(BaseException):
    """What a kill looks like from inside."""


@pytest.fixture(scope="session")
def everything_in(settings_in: SettingsOf, cross_encoder: Path) -> SettingsOf:
    """Settings that go through every stage, each of several files."""
    return partial(settings_in, method="both", rescore=str(cross_encoder), sample="random", margin=0.001)


@pytest.fixture
def everything(everything_in: SettingsOf, tmp_path: Path) -> Settings:
    return everything_in(tmp_path)


def arrays(settings: Settings) -> list[str]:
    return sorted(str(file.relative_to(settings.parts)) for file in settings.parts.rglob("*.npy"))


@pytest.fixture(scope="session")
def undisturbed(everything_in: SettingsOf, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[str]]:
    """Output of a run that nothing stopped, and the arrays that it made."""
    settings = everything_in(tmp_path_factory.mktemp("undisturbed"))
    return output(settings), arrays(settings)


@pytest.mark.parametrize("stage", ["queries", "documents", "dense", "words", "bm25", "rescored", "written"])
def test_a_run_that_was_killed_goes_on_and_gives_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch, everything: Settings, undisturbed: tuple[bytes, list[str]], stage: str
) -> None:
    whole, expected = undisturbed
    made: list[str] = []
    array, row = Stage.array, run._row

    def counted(self: Stage, name: str, make: Callable[[], np.ndarray]) -> np.ndarray:
        def counted_make() -> np.ndarray:
            if killing and self.folder.name == stage and any(one.startswith(f"{stage}/") for one in made):
                raise Interrupted
            found = make()
            made.append(f"{self.folder.name}/{name}.npy")
            return found

        return array(self, name, counted_make)

    monkeypatch.setattr(Stage, "array", counted)
    monkeypatch.setattr(run, "_row", killer(row, 5) if stage == "written" else row)
    killing = True
    with pytest.raises(Interrupted):
        run.mine(everything)
    assert not everything.output.exists()
    killing = False
    monkeypatch.setattr(run, "_row", row)
    assert output(everything) == whole
    assert sorted(made) == expected  # nothing was done twice


def killer(function: Callable[..., Any], times: int) -> Callable[..., Any]:
    left = iter(range(times))

    def call(*arguments: Any) -> Any:
        if next(left, None) is None:
            raise Interrupted
        return function(*arguments)

    return call


KILLED = """
import json, os, signal, sys
from pathlib import Path
from luthier.modalities.embedding.mine import run
from luthier.modalities.embedding.mine.settings import Settings
left = iter(range(int(sys.argv[2])))
sync = os.fsync
def fsync(number):
    if next(left, None) is None:
        os.kill(os.getpid(), signal.SIGKILL)
    sync(number)
os.fsync = fsync
given = json.loads(sys.argv[1])
run.mine(Settings(**{**given, "output": Path(given["output"])}))
"""


def test_a_process_killed_while_it_writes_leaves_nothing_half_done(
    everything: Settings, undisturbed: tuple[bytes, list[str]]
) -> None:
    given = json.dumps(asdict(everything), default=str)
    killed = subprocess.run([sys.executable, "-c", KILLED, given, "5"], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert list(everything.parts.rglob("*.new"))
    assert (output(everything), arrays(everything)) == undisturbed
    assert not list(everything.parts.rglob("*.new"))


def test_other_settings_start_over_where_they_matter(
    settings_of: SettingsOf, rows_of, world, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("luthier").propagate = True
    caplog.set_level(logging.INFO)

    def told() -> set[str]:
        found = {one.getMessage() for one in caplog.records if one.name.startswith("luthier")}
        caplog.clear()
        return {text.split(" starts over")[0] for text in found}

    settings = settings_of()
    first = output(settings)
    assert output(replace(settings, margin=0.001)) != first
    assert told() == set()  # margins need nothing anew
    output(replace(settings, last=10))
    assert told() == {"dense"}
    changed = settings_of(rows=[*world, {"anchor": "tell q7 d7", "positive": "ask d7 q7"}])
    found = output(changed)
    assert told() == {"queries", "documents", "dense"}
    assert found == output(replace(changed, output=changed.output.with_name("fresh.jsonl")))


def test_a_changed_model_is_another_model(sentence_model: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(sentence_model, copy)
    assert models.identity(str(copy)) == models.identity(str(sentence_model))
    config = copy / "config_sentence_transformers.json"
    config.write_text(config.read_text().replace("ask : ", "ask: "))
    assert models.identity(str(copy)) != models.identity(str(sentence_model))
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(sentence_model, checkpoint / "model")
    (checkpoint / "COMMIT").write_text("")
    assert models.identity(str(checkpoint)) == models.identity(str(sentence_model))


def test_a_query_is_chosen_for_few_at_a_time(monkeypatch: pytest.MonkeyPatch, everything: Settings) -> None:
    """What is in memory is bounded by the settings, not by the data."""
    queries: list[int] = []
    pairs: list[int] = []
    candidates, scores = choose.candidates, models.Rescorer.scores

    def seen(settings: Settings, pool: Any, block: range, *rest: Any) -> Any:
        queries.append(len(block))
        return candidates(settings, pool, block, *rest)

    def counted(self: models.Rescorer, given: list[tuple[str, str]]) -> np.ndarray:
        pairs.append(len(given))
        return scores(self, given)

    monkeypatch.setattr(run, "candidates", seen)
    monkeypatch.setattr(models.Rescorer, "scores", counted)
    run.mine(everything)
    assert max(queries) == everything.rescored_piece
    assert max(pairs) <= everything.rescored_piece * (everything.last + 3)
    assert len(pairs) > 3


# ------------------------------------------------------------------------------------------------ command line


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["mine", *map(str, arguments)])
    return int(stopped.value.code or 0)


def test_the_verb_mines(
    settings_of: SettingsOf, world, sentence_model: Path, cross_encoder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_of(rows=[{"title": row["anchor"], "body": row["positive"]} for row in world])
    code = call(
        settings.data, "--model", sentence_model, "--output", settings.output, "--method", "both", "--negatives", 2,
        "--role", "anchor=title", "--role", "positive=body", "--rescore", cross_encoder, "--relative-margin", 0,
    )  # fmt: skip
    assert code == 0
    rows = [json.loads(line) for line in settings.output.read_text().splitlines()]
    assert len(rows) == len(world)
    assert all(len(row["negatives"]) == 2 and len(row["scores"]) == 3 for row in rows)
    told = capsys.readouterr().out
    assert "passed over: known" in told
    assert "rows with fewer than 2" in told


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--model"),
        (["--model", "nowhere/at/all"], "--model"),
        (["--method", "bm25", "--margin", "0.1"], "--margin"),
        (["--method", "bm25", "--scores"], "--scores"),
        (["--method", "bm25", "--role", "anchor"], "--role"),
        (["--method", "bm25", "--corpus", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_errors_are_told_and_exit_with_2(
    settings_of: SettingsOf, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    settings = settings_of()
    assert call(settings.data, "--output", settings.output, *arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert named in told
    assert not settings.output.exists()


@pytest.mark.parametrize(("module", "package", "method"), [("faiss", "faiss-cpu", "dense"), ("bm25s", "bm25s", "bm25")])
def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, settings_of: SettingsOf, capsys: pytest.CaptureFixture[str],
    module: str, package: str, method: str,
) -> None:  # fmt: skip
    from luthier.modalities.embedding.mine import settings as module_of_settings

    find = module_of_settings.find_spec
    monkeypatch.setattr(module_of_settings, "find_spec", lambda name: None if name == module else find(name))
    settings = settings_of()
    assert call(settings.data, "--model", settings.model, "--output", settings.output, "--method", method) == 2
    told = capsys.readouterr().err
    assert repr(package) in told
    assert "luthier[embedding]" in told


def test_the_verbs_of_modalities_are_light() -> None:
    script = (
        "import sys; from luthier.common import cli; "
        "assert 'mine' in [command.callback.__name__ for command in cli.app.registered_commands]; "
        "heavy = {'torch', 'numpy', 'pydantic', 'transformers', 'sentence_transformers', 'faiss', 'bm25s'}; "
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
