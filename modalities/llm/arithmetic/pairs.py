"""Pairs of a right and a wrong answer to the last question of each dialogue, to evaluate on: every question has one,
whatever a model can or can't do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

_NUMBER = re.compile(r"\d+")


def make_pairs(sums: str | Path, folder: str | Path, seed: int = 0) -> None:
    """Write `validation.jsonl` and `test.jsonl`: rows of `prompt`, `chosen`, `rejected` and `operands`.

    Args:
        sums: folder of the dialogues, as `make_sums` writes them.
        folder: where the files go; made if need be.
        seed: fixes the mistakes.
    """
    rng = np.random.default_rng([seed, 1])
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name in ("test", "validation"):
        file = Path(sums, f"{name}.jsonl")
        with Path(folder, file.name).open("w", encoding="utf-8") as out:
            for line in file.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                *prompt, right = row["messages"]
                wrong = {"role": "assistant", "content": mistaken(right["content"], rng)}
                pair = {"prompt": prompt, "chosen": [right], "rejected": [wrong], "operands": row["operands"]}
                out.write(json.dumps(pair) + "\n")


def mistaken(answer: str, rng: np.random.Generator) -> str:
    """An answer with one slip, and with what follows from it: the ones or the tens added wrongly by one, what is
    carried forgotten, or the result misread in one digit."""
    numbers = [int(one) for one in _NUMBER.findall(answer)]
    count = (len(numbers) - 4) // 2  # ones, their sum, the carried part and tens, their sum, the result
    ones, tens = numbers[:count], numbers[count + 1 : -2]
    of_ones, of_tens, result = numbers[count], numbers[-2], numbers[-1]
    slip = ("ones", "tens", "carry", "result")[int(rng.integers(4))]
    change = int(rng.choice([-1, 1]))
    if slip == "carry" and tens[0] == 0:
        slip = "tens"
    if slip == "ones":
        of_ones = of_ones + change if of_ones + change >= 0 else of_ones + 1
        tens = [of_ones // 10, *tens[1:]]
        of_tens = sum(tens)
    elif slip == "carry":
        tens = [0, *tens[1:]]
        of_tens = sum(tens)
    elif slip == "tens":
        of_tens += change
    result = of_tens * 10 + of_ones % 10 if slip != "result" else result + change * int(rng.choice([1, 10]))
    first, second = ("+".join(map(str, part)) for part in (ones, tens))
    return f"{first}={of_ones}, {second}={of_tens}: {result}"
