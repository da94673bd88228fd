"""A language model that is trained against what it was before: log-probabilities of answers under both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...common.losses import TokenLoss
from . import reference
from .model import Head, decode
from .probe import probe_shared
from .sft import task as sft


class PolicyTask(sft.Task):
    """Trains on answers that share their prompts. A subclass gives the data path and the loss.

    The reference is the model as it is before the training: with a new adapter the model under it; with a saved one the
    same model under a frozen copy of that; else a second model, frozen; or the one that `model.reference` names. It is
    computed without dropout.
    """

    recipe: Any
    processing: Any
    other: nn.Module | None
    """The second model, if there is one."""

    def __init__(self, recipe: Any, weights: Path | None = None):
        super().__init__(recipe, weights)
        probe_shared(self.causal, self._head)
        self.other = None
        self._known: reference.Known | None = None
        self._other_head: list[Head] = []
        self._way = reference.way(recipe.model)
        if self.needs_reference and not self.precomputes:
            self._load_other()

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the model with a reference."""
        return True

    @property
    def precomputes(self) -> bool:
        """Whether the log-probabilities of the reference are computed before the training."""
        return bool(self.recipe.task.precompute_reference)

    @staticmethod
    def token_loss(recipe: Any) -> TokenLoss:
        return TokenLoss()

    def _load_other(self) -> None:
        """Load the second model or adapter, if one is needed and not there."""
        if self._way == "adapter":
            reference.load_adapter(self.model, self.recipe.model.adapter)
        if self._way != "model" or self.other is not None:
            return
        path = self.recipe.model.reference
        other = reference.load(self.recipe, self.processing.tokenizer, path, "model.reference")
        self.other = other.to(self.causal.device)
        self._other_head = [Head(self.other, TokenLoss())]

    # ------------------------------------------------------------------ log-probabilities

    def _run(self, data: dict[str, Any]) -> Any:
        """The decoder's output over a row of answers that share their prompts."""
        return decode(self.causal, data, None, **({"output_router_logits": True} if self._router_weight else {}))

    def answer_log_probs(self, hidden: Tensor, data: dict[str, Any]) -> Tensor:
        """[A] log-probability of each answer, in nats, from the last hidden states [N, D]."""
        return _summed(self._head, hidden, data)

    @torch.no_grad()
    def reference_log_probs(self, data: dict[str, Any]) -> Tensor:
        """[A] log-probability of each answer under the reference."""
        if self._known is not None:
            return self._known.of(data["groups"]).to(data["input_ids"].device)
        self._load_other()
        with self._as_reference() as (causal, head):
            return _summed(head, decode(causal, data).last_hidden_state[0], data)

    @contextmanager
    def _as_reference(self) -> Iterator[tuple[Any, Head]]:
        """The reference, in evaluation mode; afterwards all is as it was."""
        if self.other is not None:
            self.other.eval()
            yield self.other, self._other_head[0]
            return
        with reference.as_reference(self.model, self._way == "adapter"):
            yield self.causal, self._head

    def exportable(self) -> Any:
        from .export import PolicyExport

        return PolicyExport(self)

    # ------------------------------------------------------------------ ahead

    def look_ahead(self, examples: Sequence[Any], folder: Path) -> None:
        """Compute the log-probabilities of the reference once, if the recipe asks for it; a second model or adapter is
        dropped then."""
        if not (self.needs_reference and self.precomputes):
            return
        self._load_other()
        known = reference.Known(folder / "reference", reference.fingerprint(self.other or self.model, self.recipe))
        missing = known.missing([example.group for example in examples])
        if missing:
            known.add(missing, self._computed(missing))
        self._known = known
        if self.other is not None:
            self.other, self._other_head = None, []
        elif self._way == "adapter":
            self.model.delete_adapter(reference.ADAPTER)

    def _computed(self, missing: Sequence[Any]) -> list[float]:
        """Log-probabilities of single documents, each rank computing its share."""
        device = self.causal.device
        wanted = torch.device("cuda") if reference.on_gpu(self.recipe) else device
        self.to(wanted)
        try:
            return reference.compute(self._values, missing, self.recipe, self.causal.device)
        finally:
            self.to(device)

    def _values(self, data: dict[str, Any]) -> Tensor:
        with self._as_reference() as (causal, head):
            return _summed(head, decode(causal, data).last_hidden_state[0], data)


def _summed(head: Head, hidden: Tensor, data: dict[str, Any]) -> Tensor:
    """[A] sums over the tokens of each answer that carry loss."""
    single = head.log_probs(hidden[data["places"]], data["labels"])
    return torch.segment_reduce(single, "sum", lengths=data["counts"])
