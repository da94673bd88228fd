"""Pairs of a right answer and one that a fine-tuned model gave itself, which preferences then correct."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....common.console import progress

BATCH = 256
"""Answers that are sampled at once."""


def make_mistakes(model: str | Path, dialogues: str | Path, file: str | Path, tries: int = 2, seed: int = 0) -> int:
    """Let a model answer the last question of each dialogue several times, at temperature 1, and write its wrong
    answers as pairs: rows of `prompt`, `chosen` (the dialogue's own answer, whose form the model has learned),
    `rejected` and `operands`. A wrong answer that comes twice stands once; a question without one is left out.

    Args:
        model: directory of the fine-tuned model and its tokenizer.
        dialogues: file of `make_sums`; no other sums come into the pairs. Of those that the model was trained on it
            makes fewer mistakes, and others than of new ones.
        file: where the pairs go; its folder is made if need be.
        tries: answers to each question.
        seed: fixes the samples.

    Returns:
        the number of pairs.
    """
    rows = [json.loads(line) for line in Path(dialogues).read_text(encoding="utf-8").splitlines()]
    given = _answers(str(model), [row["messages"][:-1] for row in rows], tries, seed)
    pairs = []
    for row, answers in zip(rows, given, strict=True):
        *prompt, right = row["messages"]
        for wrong in sorted(set(answers) - {right["content"]}):
            rejected = [{"role": "assistant", "content": wrong}]
            pairs.append({"prompt": prompt, "chosen": [right], "rejected": rejected, "operands": row["operands"]})
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    return len(pairs)


def _answers(model: str, prompts: Sequence[Any], tries: int, seed: int) -> list[list[str]]:
    """The whole answers among `tries` to each prompt."""
    import numpy as np
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from ....common.losses import TokenLoss
    from ..model import Head
    from ..rl.engines.engine import Sampling
    from ..rl.engines.local import LocalEngine

    disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    causal = AutoModelForCausalLM.from_pretrained(model).eval()
    template: dict[str, Any] = {"add_generation_prompt": True, "return_dict": False}
    ids = [np.array(tokenizer.apply_chat_template(one, **template), dtype=np.int32) for one in prompts]
    ends = causal.generation_config.eos_token_id
    sampling = Sampling(max_new_tokens=40, stops=(ends,) if isinstance(ends, int) else tuple(ends))
    engine = LocalEngine(causal, Head(causal, TokenLoss()), BATCH)
    seeds = np.random.SeedSequence(seed).generate_state(len(ids) * tries, np.uint64).reshape(-1, tries).tolist()
    order = sorted(range(len(ids)), key=lambda at: len(ids[at]))
    found: list[list[str]] = [[] for _ in ids]
    with progress("sampling answers", "questions") as show:
        for begin in range(0, len(order), BATCH):
            part = order[begin : begin + BATCH]
            drawn = engine.generate([ids[at] for at in part], sampling, [seeds[at] for at in part])
            for at, completions in zip(part, drawn, strict=True):
                found[at] = [str(tokenizer.decode(one.tokens[:-1])) for one in completions if one.finished]
            show(begin + len(part), len(order))
    return found
