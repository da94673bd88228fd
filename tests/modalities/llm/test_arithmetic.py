"""The exercise's dialogues and model: made on the spot, the same each time, and fit for training."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from luthier.common.evaluation.saved import evaluate_checkpoint
from luthier.common.reading import load
from luthier.common.training.run import train
from luthier.common.verify import run as verify
from luthier.modalities.llm.arithmetic import prepare as preparation
from luthier.modalities.llm.arithmetic.__main__ import main
from luthier.modalities.llm.arithmetic.mistakes import make_mistakes
from luthier.modalities.llm.arithmetic.model import make_model
from luthier.modalities.llm.arithmetic.pairs import make_pairs
from luthier.modalities.llm.arithmetic.prepare import FOLDER, fine_tuned, prepare
from luthier.modalities.llm.arithmetic.sums import answer, make_sums, words
from luthier.modalities.llm.rl.engines.engine import Completion
from luthier.modalities.llm.rl.engines.local import LocalEngine

COUNTS = {"train": 60, "validation": 20, "test": 30, "further": 25}
RECIPE = "llm/arithmetic-sft"


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sums")
    make_sums(folder, seed=1, **COUNTS)
    return folder


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((37, 58), "7+8=15, 1+3+5=9: 95"),
        ((10, 20), "0+0=0, 0+1+2=3: 30"),
        ((99, 99, 99), "9+9+9=27, 2+9+9+9=29: 297"),
    ],
)
def test_an_answer_adds_column_by_column(numbers: tuple[int, ...], said: str) -> None:
    assert answer(numbers) == said


def test_every_answer_is_right(sums: Path) -> None:
    for name, count in COUNTS.items():
        found = rows(sums, name)
        assert len(found) == count
        for row in found:
            pairs = list(zip(row["messages"][::2], row["messages"][1::2], strict=True))
            assert 1 <= len(pairs) <= 3
            for asked, said in pairs:
                numbers = [int(number) for number in re.findall(r"\d+", asked["content"])]
                assert 2 <= len(numbers) <= 3
                assert all(10 <= number <= 99 for number in numbers)
                assert said["content"] == answer(numbers)
                assert int(said["content"].rpartition(": ")[2]) == sum(numbers)
            assert row["operands"] == len(numbers)


def test_no_sum_is_in_two_files_in_any_order(sums: Path) -> None:
    def asked(name: str) -> set[tuple[int, ...]]:
        texts = [one["content"] for row in rows(sums, name) for one in row["messages"] if one["role"] == "user"]
        return {tuple(sorted(int(number) for number in re.findall(r"\d+", text))) for text in texts}

    test, validation, training, further = (asked(name) for name in ("test", "validation", "train", "further"))
    assert not test & validation
    assert not training & (test | validation)
    assert not further & (test | validation | training)


def test_dialogues_depend_on_the_seed_alone(sums: Path, tmp_path: Path) -> None:
    make_sums(tmp_path / "same", seed=1, **COUNTS)
    make_sums(tmp_path / "other", seed=2, **COUNTS)
    assert digests(tmp_path / "same") == digests(sums)
    assert digests(tmp_path / "other")["test.jsonl"] != digests(sums)["test.jsonl"]


def test_pairs_are_the_last_answers_and_ones_with_a_slip(sums: Path, tmp_path: Path) -> None:
    """Same prompts and form; a wrong answer follows from its slip, but for a result that is misread."""
    make_pairs(sums, tmp_path, seed=1)
    assert not (tmp_path / "train.jsonl").exists(), "these are a model's own mistakes"
    form = re.compile(r"([\d+]+)=(\d+), ([\d+]+)=(\d+): (\d+)")
    slips, number = 0, COUNTS["validation"] + COUNTS["test"]
    for name in ("validation", "test"):
        for row, pair in zip(rows(sums, name), rows(tmp_path, name), strict=True):
            assert pair["prompt"] + pair["chosen"] == row["messages"]
            right, wrong = pair["chosen"][0]["content"], pair["rejected"][0]["content"]
            assert right != wrong
            _, ones, _, tens, result = form.fullmatch(wrong).groups()  # type: ignore[union-attr]
            misread = int(result) != int(tens) * 10 + int(ones) % 10
            assert misread or int(result) != int(right.rpartition(": ")[2])
            slips += not misread
    assert 0.5 < slips / number < 1


def test_the_model_loads_and_reads_numbers_digit_by_digit(sums: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "one", words(), seed=3)
    make_model(tmp_path / "two", words(), seed=3)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / "one")
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert model.config.vocab_size == len(tokenizer)
    assert tokenizer.tokenize("7+8=15, 1+3+5=9: 95") == [*"7+8=15,", "Ġ", *"1+3+5=9:", "Ġ", "9", "5"]
    for row in rows(sums, "train"):
        for one in row["messages"]:
            pieces = tokenizer.tokenize(one["content"])
            assert len([piece for piece in pieces if piece.strip("Ġ").isalpha()]) <= 3, "a word is one piece"
    unseen = "Ça va, 世界?"
    assert tokenizer.decode(tokenizer(unseen).input_ids) == unseen


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "make_sums", lambda folder, seed: make_sums(folder, seed, **COUNTS))


def test_what_is_prepared_is_not_made_again(few: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert main(str(tmp_path)) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert f"luthier train {RECIPE} model.path={tmp_path / 'model'}" in capsys.readouterr().out
    assert prepare(tmp_path, seed=1), "another seed is another exercise"


def test_the_recipe_is_prepared_where_it_is_verified(
    few: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = verify.short(RECIPE, [], 4)
    assert Path(recipe.model.path) == tmp_path / FOLDER / "model", "it names what prepare makes, in this folder"
    for sources in (recipe.data.train, recipe.data.validation, recipe.data.test):
        assert Path(sources[0].path).is_file()


def test_mistakes_are_the_model_s_own_samples(few: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of dialogues that are in no other file, each wrong answer once, the same each time; once a model was trained on
    the others, and anew for another."""
    prepare(tmp_path)
    asked = []
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / "model")

    def answered(self: LocalEngine, prompts: Any, sampling: Any, seeds: Any) -> list[list[Completion]]:
        assert sampling.temperature == 1
        assert len({seed for of in seeds for seed in of}) == sum(map(len, seeds))
        asked.extend(tokenizer.decode(one) for one in prompts)
        texts = ("1+1=2, 0+1+1=2: 22<|im_end|>", "what")
        made = [(tokenizer(text, return_tensors="np").input_ids[0], text != "what") for text in (*texts, texts[0])]
        return [[Completion(ids, ids * 0.0, finished, 0) for ids, finished in made[: len(of)]] for of in seeds]

    monkeypatch.setattr(LocalEngine, "generate", answered)
    number = make_mistakes(tmp_path / "model", tmp_path / "sums" / "further.jsonl", tmp_path / "made.jsonl", tries=3)
    pairs = [json.loads(line) for line in (tmp_path / "made.jsonl").read_text().splitlines()]
    known = [(row["messages"][:-1], row["messages"][-1:]) for row in rows(tmp_path / "sums", "further")]
    assert len(asked) == len(known)
    assert number == len(pairs) == len({json.dumps(one) for one in pairs})
    for one in pairs:
        assert (one["prompt"], one["chosen"]) in known
        assert one["rejected"][0]["content"] == "1+1=2, 0+1+1=2: 22"
    assert all(text.endswith("<|im_start|>assistant\n") for text in asked)

    assert fine_tuned(tmp_path) is None
    place = tmp_path / preparation.FINE_TUNED
    (place / "model").mkdir(parents=True)
    for file in (tmp_path / "model").iterdir():
        (place / "model" / file.name).write_bytes(file.read_bytes())
    train_file = tmp_path / "sums" / "train.jsonl"
    for digest in ("0" * 64, hashlib.sha256(train_file.read_bytes()).hexdigest()):
        (place / "run.json").write_text(json.dumps({"data": {"train": {"sha256": {"train.jsonl": digest}}}}))
        if digest.startswith("0000"):
            assert fine_tuned(tmp_path) is None, "trained on other sums, perhaps on those that are to be asked"
            assert not prepare(tmp_path)
    assert prepare(tmp_path)
    assert (tmp_path / "pairs" / "train.jsonl").is_file()
    assert not prepare(tmp_path)


@pytest.mark.slow
def test_the_exercise_is_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over 90 % of sums that were not in the training."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LUTHIER_OUTPUT", raising=False)
    prepare()
    outcome = train(load(RECIPE))
    assert outcome.metrics["exact_match"] > 0.9
    assert evaluate_checkpoint(outcome.folder / "checkpoints" / "best", "test").metrics["exact_match"] > 0.9
