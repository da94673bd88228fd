"""Answers that the student samples in the place of the data's (on-policy distillation)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

from ..config import GenerateSection
from ..generate import generate
from ..tokens import Document


def answer_begin(document: Document) -> int:
    """Where the last stretch of tokens that carry loss begins: what is before it is the prompt."""
    places = np.flatnonzero(document.trained)
    breaks = np.flatnonzero(np.diff(places) > 1)
    return int(places[breaks[-1] + 1] if len(breaks) else places[0])


@torch.no_grad()
def sampled(
    causal: Any,
    documents: Sequence[Document],
    share: float,
    section: GenerateSection,
    ends: Collection[int],
    pad: int,
    max_length: int,
) -> tuple[list[Document], list[bool]]:
    """The documents, some of them with a sampled answer, and which: each with the probability `share`.

    Draws from torch's generator, which a training seeds by (seed, batch number): the same model samples the same
    answers for the same batch. An earlier answer of a conversation stays, and carries loss as before. What stood after
    the answer goes, as nothing in it carries loss.

    Args:
        causal: the student's transformers model; run in evaluation mode.
        documents: of the batch.
        share: probability of each.
        section: most tokens, and temperature.
        ends: ids that end an answer.
        pad: any id.
        max_length: longest document; an answer is cut there.
    """
    chosen = (torch.rand(len(documents)) < share).tolist()
    begins = [answer_begin(one) for one in documents]
    asked = [at for at, one in enumerate(chosen) if one and begins[at] < max_length]
    if not asked:
        return list(documents), [False] * len(documents)
    modes = {module: module.training for module in causal.modules()}
    causal.eval()
    try:
        answers = generate(causal, [documents[at].ids[: begins[at]] for at in asked], section, ends, pad)
    finally:
        for module, mode in modes.items():
            module.training = mode
    found, last = list(documents), min(ends, default=pad)
    for at, answer in zip(asked, answers, strict=True):
        # Which end token it was changes nothing: the student and the teacher are compared before it.
        ids = [*answer.ids, last] if answer.is_finished else answer.ids
        ids = ids[: max_length - begins[at]]
        own = documents[at].part(0, begins[at])
        found[at] = Document(
            np.concatenate([own.ids, np.array(ids, dtype=np.int32)]),
            np.concatenate([own.trained, np.ones(len(ids), dtype=bool)]),
        )
    return found, [at in set(asked) for at in range(len(documents))]
