"""A recipe is refused with its place, what was given and the nearest right name; a good one survives a round trip."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from luthier.common import reading
from luthier.common.errors import RecipeError

TREE: dict[str, Any] = {
    "task": {"kind": "asr.whisper"},
    "model": {"path": "someone/a-model"},
    "data": {"train": "train.jsonl"},
    "output": "out",
}


def write(folder: Path, tree: Any) -> Path:
    file = folder / "run.yaml"
    file.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree), encoding="utf-8")
    return file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path, TREE)


def refused(file: Path, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        reading.load(file, overrides)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------ keys and kinds


@pytest.mark.parametrize(
    ("assignment", "place", "near"),
    [
        ("optimm.name=adam", "optimm", "optim"),
        ("train.epoks=3", "train.epoks", "epochs"),
        ("optim.learning_rat=1", "optim.learning_rat", "learning_rate"),
        ("data.batch.exampels=3", "data.batch.exampels", "examples"),
        ("data.batch.secnds=3", "data.batch.secnds", "seconds"),  # a field that only this kind has
        ("model.lora.rnk=3", "model.lora.rnk", "rank"),
        ("data.train=[{path: a, wieght: 2}]", "data.train.0.wieght", "weight"),
        ("optim.groups=[{match: a}, {match: b, lerning_rate: 2}]", "optim.groups.1.lerning_rate", "learning_rate"),
        ("data.augment.time_mask=1", "data.augment.time_mask", "time_masks"),
    ],
)
def test_a_mistyped_key_is_named_with_its_path_and_the_nearest_right_one(
    file: Path, assignment: str, place: str, near: str
) -> None:
    message = refused(file, assignment)
    assert f"{file}: {place}: unknown key" in message
    assert f"given:    {place.rpartition('.')[2]}\n" in message
    assert f"'{near}' perhaps" in message


def test_a_key_like_nothing_lists_those_that_exist(file: Path) -> None:
    message = refused(file, "train.zzzz=1")
    assert "one of epochs, steps, accumulate" in message


def test_all_problems_are_told_at_once(file: Path) -> None:
    message = refused(file, "train.epoks=3", "optim.name=adamm", "data.batch.examples=0")
    assert all(place in message for place in ("train.epoks", "optim.name", "data.batch.examples"))


def test_unknown_kind(file: Path) -> None:
    message = refused(file, "task.kind=asr.whispr")
    assert f"{file}: task.kind: unknown kind" in message
    assert "given:    asr.whispr" in message
    assert "'asr.whisper' perhaps" in message


@pytest.mark.parametrize("task", [None, {}, "asr.whisper", {"kind": 3}])
def test_no_kind(tmp_path: Path, task: Any) -> None:
    message = refused(write(tmp_path, {**TREE, "task": task}))
    assert "task.kind: missing" in message
    assert "asr.whisper" in message


@pytest.mark.parametrize("path", ["model.path", "data.train", "output", "model", "data"])
def test_missing(tmp_path: Path, path: str) -> None:
    tree = json.loads(json.dumps(TREE))
    *parents, last = path.split(".")
    node = tree
    for parent in parents:
        node = node[parent]
    del node[last]
    message = refused(write(tmp_path, tree))
    assert f"{path}: missing" in message
    assert f"add {path}=" in message


# ------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize(
    ("assignment", "place", "given", "expected"),
    [
        ("train.seed=abc", "train.seed", "'abc'", "integer"),
        ("train.seed=-1", "train.seed", "-1", "greater than or equal to 0"),
        ("optim.name=adamm", "optim.name", "'adamm'", "'adamw'"),
        ("model.path=null", "model.path", "None", "string"),
        ("model.trust_remote_code=maybe", "model.trust_remote_code", "'maybe'", "boolean"),
        ("data.train=3", "data.train.0", "3", "Source"),
        ("data.batch=3", "data.batch", "3", "dictionary"),
        ("optim.learning_rate=.inf", "optim.learning_rate", "inf", "finite"),
        ("optim.learning_rate=.nan", "optim.learning_rate", "nan", "finite"),
        ("train.epochs=.inf", "train.epochs", "inf", "finite"),
        ("data.train=[{path: a, weight: .inf}]", "data.train.0.weight", "inf", "finite"),
        ("optim.betas=[0.9, .nan]", "optim.betas.1", "nan", "finite"),
        ("data.train=[{path: a, weight: 0}]", "data.train.0.weight", "0", "greater than 0"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(
    file: Path, assignment: str, place: str, given: str, expected: str
) -> None:
    message = refused(file, assignment)
    assert f"{file}: {place}: " in message
    assert f"given:    {given}" in message
    assert expected in message


def test_epochs_and_steps_exclude_each_other(file: Path) -> None:
    message = refused(file, "train.epochs=2", "train.steps=10")
    assert f"{file}: train: give either epochs or steps, not both" in message
    assert reading.load(file, ["train.steps=10"]).train.epochs is None


def test_the_path_of_a_value_of_two_types_is_that_of_the_file(file: Path) -> None:
    for assignment in ("evaluate.every=often", "train.devices=two", "data.audio.channel=left"):
        path = assignment.partition("=")[0]
        message = refused(file, assignment)
        assert f"{path}: " in message
        assert f"{path}." not in message
        assert message.count(f"{path}: ") == 1
        assert ", or input should be" in message  # all that would be right, in one line


@pytest.mark.parametrize(
    "assignment",
    [
        "evaluate.every=0",
        "checkpoint.every=0",
        "checkpoint.every=evaluation",  # a checkpoint is saved with each evaluation anyhow
        "optim.name=adam",  # its decay is not decoupled
        "optim.groups=[{match: '('}]",  # re.error in optim.groups
        "data.train=[]",
        "output=",
        "optim.betas=[0.9, 1.5]",  # ValueError in torch
        "train.devices=0",
    ],
)
def test_a_value_that_would_stop_the_run_later_is_refused_at_once(file: Path, assignment: str) -> None:
    refused(file, assignment)


def test_a_recipe_is_frozen(file: Path) -> None:
    loaded = reading.load(file)
    with pytest.raises(ValidationError, match="frozen"):
        loaded.train.seed = 3  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        loaded.output = "elsewhere"  # type: ignore[misc]


# ------------------------------------------------------------------------------------------------ YAML


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("output: a\noutput: b\n", "the key 'output' is given twice"),
        ("train:\n  seed: 1\n  epochs: 2\n  seed: 3\n", "the key 'seed' is given twice"),
        ("optim: {name: sgd, name: adam}\n", "the key 'name' is given twice"),
        ("task:\n  kind: [1\nmodel: 2\n", "line 3: not valid YAML"),
        ("task:\n\tkind: a\n", "line 2: not valid YAML"),
        ("task: 1\n---\ntask: 2\n", "not valid YAML"),
        ("? [a]\n: 1\n", "not valid YAML"),
        ("task: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
    ],
)
def test_bad_yaml_is_refused_with_the_line(tmp_path: Path, text: str, problem: str) -> None:
    message = refused(write(tmp_path, text))
    assert str(tmp_path / "run.yaml") in message
    assert problem in message
    assert "line" in message


@pytest.mark.parametrize(("text", "kind"), [("- a\n", "list"), ("a\n", "str"), ("", "NoneType"), ("3", "int")])
def test_not_a_mapping(tmp_path: Path, text: str, kind: str) -> None:
    message = refused(write(tmp_path, text))
    assert "a recipe is a mapping of sections" in message
    assert f"given:    {kind}" in message


def test_numbers_as_people_write_them(tmp_path: Path) -> None:
    text = yaml.safe_dump(TREE) + "optim: {learning_rate: 1e-4, eps: 1E-6, weight_decay: .5}\n"
    optim = reading.load(write(tmp_path, text)).optim
    assert (optim.learning_rate, optim.eps, optim.weight_decay) == (1e-4, 1e-6, 0.5)


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(b"\xef\xbb\xbf" + yaml.safe_dump(TREE).encode())
    assert reading.load(file).output == "out"


@pytest.mark.parametrize("extra", [b"# \xe9\n", b"# \x00\n", b"# \x07\n"], ids=["latin-1", "nul", "control"])
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, extra: bytes) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(yaml.safe_dump(TREE).encode() + extra)
    assert str(file) in refused(file)


def test_anchors_and_merge_keys(tmp_path: Path) -> None:
    text = yaml.safe_dump({**TREE, "data": None}).replace("data: null\n", "")
    text += "data:\n  train: [&one {path: a.jsonl, weight: 2}, {<<: *one, path: b.jsonl}]\n"
    sources = reading.load(write(tmp_path, text)).data.train
    assert [(source.path, source.weight) for source in sources] == [("a.jsonl", 2), ("b.jsonl", 2)]


# ------------------------------------------------------------------------------------------------ overrides


@pytest.mark.parametrize(
    ("assignments", "path", "value"),
    [
        (["optim.learning_rate=1e-4"], "optim.learning_rate", 1e-4),
        (["optim.learning_rate=1e-4", "optim.learning_rate=0.5"], "optim.learning_rate", 0.5),
        (["optim.clip_norm=null"], "optim.clip_norm", None),
        (["optim.betas=[0.8, 0.9]"], "optim.betas", (0.8, 0.9)),
        (["model.lora.rank=4"], "model.lora.rank", 4),  # a section that the file does not have
        (["model.lora.target_modules=[a, b]"], "model.lora.target_modules", ("a", "b")),
        (["model.lora.target_modules=.*_proj$"], "model.lora.target_modules", ".*_proj$"),
        (["model.lora.rank=4", "model.lora=null"], "model.lora", None),
        (["model.lora={rank: 2}", "model.lora.alpha=3"], "model.lora.alpha", 3),
        ([" train.seed =7"], "train.seed", 7),
        (["output=a=b"], "output", "a=b"),
        (["output='2024'"], "output", "2024"),
    ],
)
def test_overrides(file: Path, assignments: list[str], path: str, value: Any) -> None:
    found: Any = reading.load(file, assignments)
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value


def test_norwegian_is_not_false(file: Path) -> None:
    """YAML 1.1 reads a bare `no` as false: refused, as the field is a text, and never taken for something else."""
    assert "task.language: input should be a valid string" in refused(file, "task.language=no")
    assert reading.load(file, ["task.language='no'"]).task.language == "no"  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["train.epochs", "=3", "", "  =3"])
def test_what_is_no_assignment_is_refused(file: Path, text: str) -> None:
    message = refused(file, text)
    assert "not an override" in message
    assert "key=value" in message


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("data.train.path=x", "data.train"),  # a text in the file
        ("output.x.y=1", "output"),
        ("model.path.x=1", "model.path"),
    ],
)
def test_an_override_never_goes_through_a_scalar(file: Path, text: str, place: str) -> None:
    message = refused(file, text)
    assert f"{place}: has no keys below it" in message
    assert f"override {place} as a whole" in message


def test_an_override_never_goes_through_a_list(tmp_path: Path) -> None:
    file = write(tmp_path, {**TREE, "data": {"train": [{"path": "a"}]}})
    assert "data.train: has no keys below it" in refused(file, "data.train.0.weight=2")


def test_an_override_with_bad_yaml_names_itself(file: Path) -> None:
    assert "override data.train=[1," in refused(file, "data.train=[1,")


def test_a_mistyped_override_is_refused_like_a_mistyped_key(file: Path) -> None:
    assert "'learning_rate' perhaps" in refused(file, "optim.learing_rate=1")


# ------------------------------------------------------------------------------------------------ paths


def test_paths_that_exist_become_absolute_and_hub_names_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "train.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    tree = {**TREE, "model": {"path": "weights"}, "data": {"train": ["train.jsonl", "someone/a-set"]}}
    loaded = reading.load(write(tmp_path, tree))
    assert loaded.model.path == str(tmp_path / "weights")
    assert [source.path for source in loaded.data.train] == [str(tmp_path / "train.jsonl"), "someone/a-set"]
    monkeypatch.chdir("/")
    assert reading.build(yaml.safe_load(loaded.dump()), "dumped") == loaded


def test_the_home_folder_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "weights").mkdir()
    file = write(tmp_path, {**TREE, "model": {"path": "~/weights"}})
    assert reading.load(file).model.path == str(tmp_path / "weights")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a.jsonl", [("a.jsonl", 1.0, "a")]),
        ({"path": "b/c.jsonl", "weight": 2}, [("b/c.jsonl", 2.0, "c")]),
        (["a.jsonl", {"path": "b.jsonl", "name": "mine"}], [("a.jsonl", 1.0, "a"), ("b.jsonl", 1.0, "mine")]),
    ],
)
def test_sources_in_every_form(tmp_path: Path, value: Any, expected: list[tuple[str, float, str]]) -> None:
    loaded = reading.load(write(tmp_path, {**TREE, "data": {"train": value}}))
    assert [(source.path, source.weight, source.label) for source in loaded.data.train] == expected


# ------------------------------------------------------------------------------------------------ round trip


@pytest.mark.parametrize(
    "assignments",
    [
        [],
        ["model.lora.rank=4", "model.lora.target_modules=[a, b]", "optim.eps=1e-9", "optim.clip_norm=null"],
        ["data.train=[{path: a, weight: 0.1}, 'b # c']", "output='x: y'", "task.language=it"],
        ["evaluate.every=5", "train.devices=2", "data.audio.channel=1", "output='perché 你好'"],
        ["optim.groups=[{match: '^a\\.b$', learning_rate: 1e-7}]", "train.epochs=0.3333333333333333", "output='1e-4'"],
    ],
)
def test_what_is_dumped_reads_back_equal(file: Path, tmp_path: Path, assignments: list[str]) -> None:
    loaded = reading.load(file, assignments)
    again = tmp_path / "again.yaml"
    again.write_text(loaded.dump(), encoding="utf-8")
    assert reading.load(again) == loaded
    assert reading.load(again).dump() == loaded.dump()
