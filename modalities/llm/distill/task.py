"""Distillation from a teacher: on the tokens of the data, on answers that the student samples, or from what the teacher
said of the data once."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ....common.console import progress
from ....common.data.plan import Bounds, cut
from ....common.data.processing import Batch
from ....common.evaluation.each import Each, Part
from ....common.evaluation.run import autocast
from ....common.losses import TokenLoss, chunk_rows
from ....common.task import LossSum, Predicted
from .. import reference
from ..batch import join
from ..causal import Told
from ..config import GenerateSection
from ..losses.divergence import Top, divergence, top, top_divergence
from ..model import Head, decode
from ..probe import probe
from ..sft import task as sft
from ..tokens import IGNORED, Document
from .config import Config
from .processing import DistillProcessing
from .sampling import sampled
from .stored import Stored, joined, parts, targets_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Distilled:
    """What student and teacher make of one example.

    Args:
        told: of the student.
        divergence: summed over its tokens that carry loss, in nats.
    """

    told: Told
    divergence: float

    @property
    def fields(self) -> Mapping[str, Any]:
        """What it may be sliced by."""
        return self.told.fields


class Task(sft.Task):
    """Trains a causal language model, or an adapter of it, to predict as a teacher does."""

    metrics: ClassVar[dict[str, str]] = {"divergence": "min", **sft.Task.metrics}

    recipe: Config  # type: ignore[assignment]
    processing: DistillProcessing
    teacher: nn.Module | None

    def __init__(self, recipe: Config, weights: Path | None = None):
        super().__init__(recipe, weights)  # type: ignore[arg-type]
        self.teacher = None
        self._stored: Stored | None = None
        task = recipe.task
        self._sampling = GenerateSection(max_new_tokens=task.max_new_tokens, temperature=task.sampling_temperature)
        self._known = 0
        """Ids that both vocabularies have."""
        self._loaded_teacher()
        self.log_names = (*self.log_names, "divergence", *(("on_policy",) if task.on_policy else ()))

    @classmethod
    def make_processing(cls, recipe: Any, weights: Path | None = None) -> DistillProcessing:
        return DistillProcessing(recipe, weights)

    @classmethod
    def metrics_of(cls, recipe: Any) -> dict[str, str]:
        """The divergence first, as it is what is learned."""
        return {"divergence": "min", **super().metrics_of(recipe)}

    @property
    def need_not_fall(self) -> str:
        return "the examples are the model's own" if self.recipe.task.on_policy else super().need_not_fall

    # ------------------------------------------------------------------ teacher

    def _loaded_teacher(self) -> nn.Module:
        """The teacher, loaded if it is not there."""
        if self.teacher is None:
            teacher = reference.load(self.recipe, self.processing.tokenizer, self.recipe.model.teacher, "model.teacher")
            self.teacher = teacher.to(self.causal.device)
            self._teacher_head = Head(teacher, TokenLoss())
            probe(teacher, self._teacher_head, self.recipe.data.max_length)
            self._known = min(len(head.module.weight) for head in (self._head, self._teacher_head))
        return self.teacher

    @torch.no_grad()
    def _taught(self, data: dict[str, Any], asked: Tensor) -> Tensor | Top:
        """What the teacher says at the places [N] that are asked for: its hidden states, or its most probable ids."""
        if self._stored is not None:
            kept = [self._stored.read(one) for one in data["documents"]]
            if all(one is not None for one in kept):
                return joined([one for one in kept if one is not None], asked.device)
            if self.teacher is None:
                log.warning("log-probabilities of the teacher are gone from the disk; it is asked anew")
        hidden: Tensor = decode(self._loaded_teacher().eval(), data).last_hidden_state[0][asked]
        return hidden if self.recipe.task.top_k is None else self._top(hidden, self.recipe.task.top_k)

    def _top(self, hidden: Tensor, k: int) -> Top:
        """The teacher's most probable ids after hidden states [N, D']."""
        rows, temperature = chunk_rows(self._teacher_head.module.weight), self.recipe.task.temperature
        chunks = [hidden[at : at + rows] for at in range(0, max(1, len(hidden)), rows)]
        return joined(
            [top(self._teacher_head.logits(one), k, self._known, temperature) for one in chunks], hidden.device
        )

    def look_ahead(self, examples: Sequence[Any], folder: Path) -> None:
        """Ask the teacher about all examples once, if the recipe wants that; the teacher is dropped then."""
        task = self.recipe.task
        if task.top_k is None:
            return
        known = reference.fingerprint(self._loaded_teacher(), self.recipe)
        key = f"{known} {task.top_k} {self._known} {task.temperature}"
        stored = Stored(folder / "teacher", key, task.top_k, int(task.max_gb * 1e9))
        documents = [document for example in examples for document in example.documents]
        stored.check_room(documents)
        missing = stored.missing(documents)
        _together()
        if missing:
            self._ask(missing, stored, task.top_k)
        _together()
        self._stored, self.teacher = stored, None

    @torch.no_grad()
    def _ask(self, documents: Sequence[Document], stored: Stored, k: int) -> None:
        """Store what the teacher says of documents; each of several processes asks about its share."""
        device = torch.device("cuda") if reference.on_gpu(self.recipe) else self.causal.device
        teacher = self._loaded_teacher().to(device)
        costs = np.array([len(one) for one in documents], dtype=np.float64)
        batches = cut(np.argsort(-costs, kind="stable"), costs, Bounds(self.recipe.evaluate.batch))
        is_split = torch.distributed.is_initialized()
        rank, ranks = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if is_split else (0, 1)
        mine = batches[rank::ranks]
        with progress("asking the teacher", "batches") as show:
            for done, batch in enumerate(mine):
                chosen = [documents[number] for number in batch]
                data = _on(join(chosen), device)
                with autocast(self.recipe.train.precision, device):
                    hidden = decode(teacher, data).last_hidden_state[0][data["targets"] != IGNORED]
                    found = self._top(hidden, k)
                for one, part in zip(chosen, parts(found, [targets_of(one) for one in chosen]), strict=True):
                    stored.write(one, part)
                show(done + 1, len(mine))
        teacher.to(self.causal.device)

    # ------------------------------------------------------------------ loss

    def loss(self, data: dict[str, Any]) -> LossSum:
        """Summed divergence of the tokens that carry loss; logits of both models are in memory a chunk at a time."""
        task = self.recipe.task
        own = None
        if self.training and task.on_policy:
            data, own = self._with_samples(data)
        asked = data["targets"] != IGNORED
        taught = self._taught(data, asked)
        out = self._run(data)
        hidden = out.last_hidden_state[0]
        apart = self._divergence(hidden[asked], taught).sum()
        total, count, logs = apart, int(asked.sum()), {"divergence": float(apart.detach())}
        if own is not None:
            logs["on_policy"] = float((asked & own).sum())
        if task.sft_weight:
            said = asked if own is None else asked & ~own
            total = total + task.sft_weight * self._head.loss(hidden[said], data["targets"][said])
        if self._router_weight:
            router = self._router_loss(out.router_logits) * count
            total, logs["router"] = total + self._router_weight * router, float(router.detach())
        return LossSum(total, count, logs)

    def _with_samples(self, data: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
        """The batch with answers of the student in the place of some, and which of its tokens [N] are in such."""
        documents, are_own = sampled(
            self.causal,
            data["documents"],
            self.recipe.task.on_policy,
            self._sampling,
            self.generation_config().eos_token_id or [],
            self.processing.tokenizer.pad_token_id or 0,
            self.recipe.data.max_length,
        )
        device = data["input_ids"].device
        own = torch.from_numpy(np.repeat(are_own, [len(one) for one in documents])).to(device)
        return {**data, **_on(join(documents), device), "documents": documents}, own

    def _divergence(self, hidden: Tensor, taught: Tensor | Top) -> Tensor:
        """[N] of hidden states [N, D] of the student, from the teacher's."""
        rows = max(1, chunk_rows(self._head.module.weight) // 2)
        if isinstance(taught, Tensor):
            rows = max(1, min(rows, chunk_rows(self._teacher_head.module.weight) // 2))
        found = []
        for at in range(0, max(1, len(hidden)), rows):
            part = slice(at, at + rows)
            if isinstance(taught, Tensor):
                found.append(checkpoint(self._chunk, hidden[part], taught[part], use_reentrant=False))
            else:
                rest = None if taught.rest is None else taught.rest[part]
                few = Top(taught.ids[part], taught.log_probs[part], rest)
                found.append(checkpoint(self._few, hidden[part], few, use_reentrant=False))
        return torch.cat(found)

    def _chunk(self, hidden: Tensor, taught: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = self._teacher_head.logits(taught)
        task = self.recipe.task
        return divergence(self._head.logits(hidden), teacher, task.share, task.temperature)

    def _few(self, hidden: Tensor, taught: Top) -> Tensor:
        task = self.recipe.task
        return top_divergence(self._head.logits(hidden), taught, self._known, task.share, task.temperature)

    # ------------------------------------------------------------------ evaluation

    @torch.no_grad()
    def predict(self, batch: Batch) -> Predicted:
        """Loss, accuracy and divergence of each example of the data, and the model's answer if the recipe asks."""
        data = batch.data
        hidden = self._run(data).last_hidden_state[0]
        found = self.told(hidden, data)
        asked = data["targets"] != IGNORED
        apart = self._divergence(hidden[asked], self._taught(data, asked)).double()
        sums = [float(part.sum()) for part in apart.split([one.count for one in found.records])]
        answers = self.answered(batch, found.records)
        told = [answers.get(row, one) for row, one in enumerate(found.records)]
        return Predicted([Distilled(*pair) for pair in zip(told, sums, strict=True)], found.loss)

    def means(self, records: Sequence[Distilled]) -> dict[str, Any]:
        """Beside those of the student's answers and tokens, the mean divergence of a token."""
        count = sum(one.told.count for one in records)
        apart = sum(one.divergence for one in records) / count if count else float("nan")
        return {"divergence": apart, **super().means([one.told for one in records])}

    def parts(self, record: Distilled) -> dict[str, Part]:
        return {"divergence": (record.divergence, record.told.count), **super().parts(record.told)}

    def each(self, records: Sequence[Distilled]) -> list[Each]:
        return [Each(one.told.where, self.parts(one), one.told.fields) for one in records]

    def samples(self, records: Sequence[Distilled], number: int) -> list[dict[str, Any]]:
        return super().samples([one.told for one in records], number)


def _on(data: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in data.items()}


def _together() -> None:
    """Wait for all processes."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
