"""Answers of a model to prompts of different lengths, with transformers' own generation."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .config import GenerateSection


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model is asked in an evaluation, and what it should say.

    Args:
        ids: [T] int32, as in training up to where the answer begins.
        reference: the answer of the row.
        row: further fields of the row.
    """

    ids: np.ndarray
    reference: str
    row: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Generated:
    """What the model says after a prompt.

    Args:
        ids: tokens before the one that ends the answer.
        is_finished: whether it ended the answer; else it was cut at the most tokens allowed.
    """

    ids: list[int]
    is_finished: bool


def generate(
    causal: Any, prompts: Sequence[np.ndarray], section: GenerateSection, ends: Collection[int], pad: int = 0
) -> list[Generated]:
    """One answer for each prompt, the same as if it were alone.

    Prompts are padded at the left, told apart by place and never by id. Only what the section says counts: settings
    that a model brings with it for its sampling, such as a repetition penalty, are not used.

    Args:
        causal: the transformers model.
        prompts: [T] ids each, one token at least.
        section: how tokens are chosen, and how many at most.
        ends: ids of all tokens that end an answer.
        pad: any id.
    """
    from transformers import GenerationConfig

    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), pad, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask[row, longest - len(prompt) :] = 1
    config = GenerationConfig(
        max_new_tokens=_room(causal, longest, section.max_new_tokens),
        num_beams=section.num_beams,
        do_sample=section.temperature > 0,
        eos_token_id=sorted(ends) or None,
        pad_token_id=pad,
        **({"temperature": section.temperature, "top_k": 0, "top_p": 1.0} if section.temperature else {}),
    )
    with _without_defaults(causal):
        found = causal.generate(
            input_ids=ids.to(causal.device), attention_mask=mask.to(causal.device), generation_config=config
        )
    return [_cut(row, ends) for row in found[:, longest:].tolist()]


def _room(causal: Any, longest: int, wanted: int) -> int:
    """New tokens that the model has positions for; the last one needs none."""
    positions = getattr(causal.config.get_text_config(), "max_position_embeddings", None)
    return wanted if positions is None else max(1, min(wanted, positions - longest + 1))


@contextmanager
def _without_defaults(causal: Any) -> Iterator[None]:
    """Else generation fills all that its config leaves open from the model's own."""
    from transformers import GenerationConfig

    before = causal.generation_config
    causal.generation_config = GenerationConfig()
    try:
        yield
    finally:
        causal.generation_config = before


def _cut(ids: list[int], ends: Collection[int]) -> Generated:
    end = next((place for place, number in enumerate(ids) if number in ends), None)
    return Generated(ids if end is None else ids[:end], end is not None)
