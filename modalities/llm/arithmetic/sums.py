"""Dialogues of sums: a question, and an answer that adds column by column before it says the result."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

Sum = tuple[int, ...]
"""Numbers from 10 to 99 that are added."""

FIRST = ("What is {}?", "How much is {}?", "Add up {}.", "Please compute {}.")
NEXT = ("And {}?", "Now {}.", "What about {}?")


def answer(numbers: Sequence[int]) -> str:
    """Ones, then tens with what is carried, then the result: `7+8=15, 1+3+5=9: 95` for 37 + 58."""
    ones = sum(number % 10 for number in numbers)
    tens = ones // 10 + sum(number // 10 for number in numbers)
    first = "+".join(str(number % 10) for number in numbers)
    second = "+".join(str(part) for part in (ones // 10, *(number // 10 for number in numbers)))
    return f"{first}={ones}, {second}={tens}: {sum(numbers)}"


def make_sums(
    folder: str | Path, seed: int = 0, train: int = 5000, validation: int = 500, test: int = 500, further: int = 6000
) -> None:
    """Write `train.jsonl`, `validation.jsonl`, `test.jsonl` and `further.jsonl`: rows of `messages`, and of `operands`,
    the number of numbers in the last question.

    No sum of one is in another, in whatever order its numbers stand. The same arguments give the same files.

    Args:
        folder: where the files go; made if need be.
        seed: fixes the sums and the words around them.
        train: number of dialogues to train on, of one to three questions.
        validation: number of dialogues for evaluation during training.
        test: number of dialogues for the last evaluation.
        further: number of dialogues for a second training.
    """
    rng = np.random.default_rng(seed)
    Path(folder).mkdir(parents=True, exist_ok=True)
    seen: set[Sum] = set()
    counts = {"test": test, "validation": validation, "train": train, "further": further}
    for name, count in counts.items():
        rows, used = [], set()
        for _ in range(count):
            sums = list(_unseen(rng, int(rng.integers(1, 4)), seen))
            used |= {tuple(sorted(numbers)) for numbers in sums}
            rows.append({"messages": list(_messages(rng, sums)), "operands": len(sums[-1])})
        seen |= used
        _write(Path(folder) / f"{name}.jsonl", rows)


def _unseen(rng: np.random.Generator, count: int, seen: set[Sum]) -> Iterator[Sum]:
    """Sums of two or three numbers that no other file has."""
    while count:
        numbers = tuple(int(number) for number in rng.integers(10, 100, size=int(rng.integers(2, 4))))
        if tuple(sorted(numbers)) not in seen:
            count -= 1
            yield numbers


def _messages(rng: np.random.Generator, sums: Iterable[Sum]) -> Iterator[dict[str, str]]:
    for place, numbers in enumerate(sums):
        phrases = NEXT if place else FIRST
        asked = phrases[int(rng.integers(len(phrases)))].format(" + ".join(map(str, numbers)))
        yield {"role": "user", "content": asked}
        yield {"role": "assistant", "content": answer(numbers)}


def _write(file: Path, rows: Iterable[object]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def words() -> list[str]:
    """All that the dialogues are made of but for numbers, for a tokenizer to learn."""
    return [*(phrase.format("1 + 2") for phrase in (*FIRST, *NEXT)), "user\n", "assistant\n", answer((1, 2))]
