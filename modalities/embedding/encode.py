"""What a model makes of the texts of a step: each text once, sorted by length, in chunks of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .unpad import Unpadded

Run = Callable[..., dict[str, Tensor]]
"""Features of a padded batch: called with `input_ids` and `attention_mask` [B, T] and what else the texts have."""


def chunks(lengths: list[int], budget: int, padded: bool) -> Iterator[slice]:
    """Consecutive texts, of sorted lengths, that are at most `budget` tokens together; one longer text is alone.

    Args:
        padded: whether each text of a chunk costs as much as its longest.
    """
    start, longest, total = 0, 0, 0
    for at, length in enumerate(lengths):
        longest, total = max(longest, length), total + length
        if at > start and (longest * (at + 1 - start) if padded else total) > budget:
            yield slice(start, at)
            start, longest, total = at, length, length
    yield slice(start, len(lengths))


def encode(
    run: Run, names: tuple[str, ...], texts: dict[str, Tensor], hooks: Unpadded | None, budget: int, recompute: bool
) -> list[Tensor]:
    """Features of all texts, in their order.

    With `recompute` each chunk is run without keeping its activations and once more in the backward pass, with the same
    dropout, so that a batch of any size needs the memory of one chunk and has the gradient of the whole batch (Gao et
    al., Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup, arXiv:2101.06983).

    Args:
        run: the model.
        names: features that are asked for.
        texts: `input_ids`, `attention_mask` [U, T], sorted by length, and other tensors [U, ...] of the texts.
        hooks: run the layers without padding; None: with it.
        budget: tokens of a chunk.
        recompute: run each chunk again in the backward pass.

    Returns:
        Of each name a tensor [U, ...]; features of tokens are zero where a text has ended.
    """
    lengths: list[int] = texts["attention_mask"].sum(dim=1).tolist()
    found: list[list[Tensor]] = []
    for part in chunks(lengths, budget, hooks is None):
        longest = max(lengths[part])
        chunk = {name: value[part, :longest] if value.dim() > 1 else value[part] for name, value in texts.items()}
        if recompute and torch.is_grad_enabled():
            found.append(checkpoint(_run, run, names, chunk, hooks, use_reentrant=False))
        else:
            found.append(_run(run, names, chunk, hooks))
    return [_together([part[at] for part in found]) for at in range(len(names))]


def _run(run: Run, names: tuple[str, ...], chunk: dict[str, Tensor], hooks: Unpadded | None) -> list[Tensor]:
    if hooks is None:
        features: dict[str, Any] = run(**chunk)
    else:
        with hooks.over(chunk["attention_mask"]):
            features = run(**chunk)
    return [features[name] for name in names]


def _together(parts: list[Tensor]) -> Tensor:
    """Chunks one after the other; where they have tokens, of the longest's length."""
    if len(parts) == 1:
        return parts[0]
    if parts[0].dim() < 3 and len({part.shape[1:] for part in parts}) == 1:
        return torch.cat(parts)
    longest = max(part.shape[1] for part in parts)
    short = [(0, 0) * (part.dim() - 2) + (0, longest - part.shape[1]) for part in parts]
    return torch.cat([functional.pad(part, pad) for part, pad in zip(parts, short, strict=True)])
