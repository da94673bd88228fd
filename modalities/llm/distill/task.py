"""Distillation from a local teacher, on the tokens of the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ....common.losses import TokenLoss, chunk_rows
from ....common.task import LossSum
from .. import reference
from ..losses.divergence import divergence
from ..model import Head, decode
from ..probe import probe
from ..sft import task as sft
from ..tokens import IGNORED
from .config import Config


class Task(sft.Task):
    """Trains a causal language model, or an adapter of it, to predict as a teacher does."""

    recipe: Config  # type: ignore[assignment]
    teacher: nn.Module

    def __init__(self, recipe: Config, weights: Path | None = None):
        super().__init__(recipe, weights)  # type: ignore[arg-type]
        self.teacher = reference.load(recipe, self.processing.tokenizer, recipe.model.teacher, "model.teacher")
        self._teacher_head = Head(self.teacher, TokenLoss())
        probe(self.teacher, self._teacher_head, recipe.data.max_length)
        self.log_names = (*self.log_names, "divergence")

    def loss(self, data: dict[str, Any]) -> LossSum:
        """Summed divergence of the tokens that carry loss; logits of both models are in memory a chunk at a time."""
        task = self.recipe.task
        asked = data["targets"] != IGNORED
        with torch.no_grad():
            self.teacher.eval()
            taught = decode(self.teacher, data).last_hidden_state[0][asked]
        out = self._run(data)
        hidden = out.last_hidden_state[0][asked]
        apart = self._divergence(hidden, taught)
        total, count, logs = apart, int(asked.sum()), {"divergence": float(apart.detach())}
        if task.sft_weight:
            total = total + task.sft_weight * self._head.loss(hidden, data["targets"][asked])
        if self._router_weight:
            router = self._router_loss(out.router_logits) * count
            total, logs["router"] = total + self._router_weight * router, float(router.detach())
        return LossSum(total, count, logs)

    def _divergence(self, hidden: Tensor, taught: Tensor) -> Tensor:
        """Summed over hidden states [N, D] of the student and [N, D'] of the teacher."""
        rows = max(1, min(chunk_rows(head.module.weight) for head in (self._head, self._teacher_head)) // 2)
        total = hidden.new_zeros((), dtype=torch.float32)
        for at in range(0, max(1, len(hidden)), rows):
            part = hidden[at : at + rows], taught[at : at + rows]
            total = total + checkpoint(self._chunk, *part, use_reentrant=False)
        return total

    def _chunk(self, hidden: Tensor, taught: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = self._teacher_head.logits(taught)
        task = self.recipe.task
        return divergence(self._head.logits(hidden), teacher, task.share, task.temperature).sum()
