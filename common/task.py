"""Task: a model, its loss and its predictions, on Lightning's loop. The only base class of a modality's models."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from . import gradients, optim
from .data.processing import Batch, Processing
from .errors import ExportError
from .evaluation.each import Each
from .exportable import Exportable
from .recipe import Recipe
from .seeding import seed_batch
from .training.spikes import Spikes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LossSum:
    """A loss that has not been divided yet.

    Args:
        sum: scalar tensor, the summed loss of what carries loss.
        count: how much carries loss (target tokens, pairs, ...).
        logs: further sums over the same count, to be logged as means.
    """

    sum: Tensor
    count: float
    logs: dict[str, float] = field(default_factory=dict)


@dataclass
class StepResult:
    """What the last optimizer step did, over the whole accumulation window and all ranks.

    Args:
        loss: summed loss / count.
        logs: the further means.
        norm: 2-norm of the gradient before clipping.
        skipped: whether the update was left out.
        count: how much carried loss.
        items: examples.
        real: cost of the examples, in the modality's unit.
        padded: cost with padding.
        bad: examples that could not be encoded.
        learning_rate: of the first parameter group.
        reason: what was wrong with it: it was left out or, if it was a spike, perhaps only recorded.
        scale: what the gradient was multiplied by to be the mean's, besides clipping.
    """

    loss: float = 0.0
    logs: dict[str, float] = field(default_factory=dict)
    norm: float = 0.0
    skipped: bool = False
    count: float = 0.0
    items: int = 0
    real: float = 0.0
    padded: float = 0.0
    bad: int = 0
    learning_rate: float = 0.0
    reason: Literal["", "non_finite", "spike", "nothing"] = ""
    scale: float = 0.0


@dataclass
class Predicted:
    """Predictions of one evaluation batch: one record for each example, and the batch's loss where there is one."""

    records: list[Any]
    loss: LossSum | None = None


class Task(LightningModule, ABC):
    """A model that can be trained, evaluated and saved.

    A subclass loads its model in `__init__` into `self.model`, sets `self.processing`, and defines `loss`, `predict`,
    `score` and `save_pretrained`. The base divides: the gradient of an optimizer step is that of the summed loss over
    the whole accumulation window and all ranks, divided by the count over the same, exactly.

    Args:
        recipe: the resolved recipe.
        weights: directory that `save_pretrained` wrote, to be loaded instead of `recipe.model.path`.
    """

    metrics: ClassVar[dict[str, str]] = {"loss": "min"}
    """Names of the metrics that `score` gives and whether the smaller (`min`) or the larger (`max`) is better;
    the first is the default for `checkpoint.best`."""

    model: nn.Module
    processing: Processing[Any]
    log_names: tuple[str, ...] = ()
    """Names that the losses of this task may have in `logs`, the same on every rank."""

    def __init__(self, recipe: Recipe, weights: Path | None = None):
        super().__init__()
        self.recipe, self.weights = recipe, weights
        self.strict_loading = False  # a checkpoint holds trained parameters only; on_load_checkpoint checks them
        self.last_step = StepResult()
        self.total_steps = 1
        self.spikes = Spikes(recipe.train.spike_factor, recipe.train.on_spike == "skip")
        self._window: list[LossSum] = []
        self._consumed = [0.0] * 4  # of the window: examples, real cost, padded cost, bad examples

    # ------------------------------------------------------------------ what a modality defines

    @classmethod
    @abstractmethod
    def make_processing(cls, recipe: Any, weights: Path | None = None) -> Processing[Any]:
        """The data path of a recipe, without the model's weights."""

    @classmethod
    def metrics_of(cls, recipe: Any) -> dict[str, str]:
        """Those of `metrics` that a recipe asks for, and those that it names itself."""
        return cls.metrics

    @abstractmethod
    def loss(self, data: Any) -> LossSum:
        """Loss of a collated batch, not divided. The model is run even where nothing carries loss, as a sharded model
        is run by all ranks together."""

    @abstractmethod
    def predict(self, batch: Batch) -> Predicted:
        """Predictions for an evaluation batch; called without gradients, in evaluation mode."""

    @abstractmethod
    def score(self, records: Sequence[Any]) -> dict[str, Any]:
        """Metrics of a whole evaluation set from its records, by name; nested mappings hold slices."""

    @abstractmethod
    def save_pretrained(self, directory: Path) -> None:
        """Write the model in the format of its own ecosystem, complete for inference."""

    def exportable(self) -> Exportable:
        """What export has to know of the model."""
        raise ExportError("there is no export of this kind yet", where="task.kind", given=self.recipe.task.kind)

    def measure(self) -> dict[str, float]:
        """Further metrics, which need none of the recipe's data: benchmarks of the field. Called at each evaluation in
        evaluation mode, by all ranks, which have to find the same."""
        return {}

    def look_ahead(self, examples: Sequence[Any], folder: Path) -> None:
        """Called once before a training, on all ranks, with the checked examples of all its sets and the folder of the
        run: for what can be computed once instead of in each step."""

    def before_evaluation(self) -> None:
        """Called before each evaluation, on all ranks, while the weights are still as the strategy holds them."""

    def samples(self, records: Sequence[Any], number: int) -> list[dict[str, Any]]:
        """A few predictions in a form for reading."""
        return []

    def each(self, records: Sequence[Any]) -> list[Each]:
        """What each example adds to those metrics that are ratios of sums, called after `score` with the same records;
        so that the error of a metric can be told. Nothing: not known."""
        return []

    # ------------------------------------------------------------------ what check and estimate have to know

    @property
    def need_not_fall(self) -> str:
        """Why the loss of a batch that is repeated need not fall in a training that is right; empty: it has to."""
        return ""

    @property
    def compares_ranks(self) -> bool:
        """Whether the loss of a batch depends on what the other ranks have, so that their number changes it."""
        return False

    def imagined(self, data: Any) -> Any:
        """A collated batch as large as the training can make it, without a word from the model: for `luthier estimate`,
        which has no weights."""
        return data

    def held_in_rollouts(self, data: Any) -> int:
        """Bytes of keys and values while the model writes what it is trained on, told by `luthier estimate`."""
        return 0

    # ------------------------------------------------------------------ modes

    def train_mode(self) -> None:
        """Trained parts in train mode; a part whose parameters are all frozen in eval mode."""
        _set_modes(self, True)

    def compile_parts(self) -> None:
        """Compile the model in place; a modality may compile its layers instead."""
        self.model.compile()

    def trained_names(self) -> set[str]:
        """Names, in the state dict, of all that training changes: parameters with gradient and persistent buffers of
        modules in train mode."""
        names = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        for prefix, module in self.named_modules():
            if module.training:
                names |= {f"{prefix}.{name}".lstrip(".") for name, _ in module.named_buffers(recurse=False)}
        return names & self.state_dict().keys()

    # ------------------------------------------------------------------ Lightning's hooks

    def configure_model(self) -> None:
        shard = getattr(self._trainer and self._trainer.strategy, "shard", None)
        if shard is not None:
            shard(self)

    @property
    def data_rank(self) -> tuple[int, int]:
        """(rank, ranks) among those that have different batches: all, or groups of processes that share layers."""
        split = getattr(self._trainer and self._trainer.strategy, "distributed_sampler_kwargs", None)
        return (split["rank"], split["num_replicas"]) if split else (0, 1)

    def gathered(self, to_save: bool = False) -> AbstractContextManager[None]:
        """Context in which this rank holds whole weights, whatever the strategy."""
        gathered = getattr(self._trainer and self._trainer.strategy, "gathered", None)
        return nullcontext() if gathered is None else gathered(self, to_save)

    def configure_optimizers(self) -> Any:
        optimizer = optim.optimizer(self, self.recipe.optim, fused=self.recipe.train.precision != "16-mixed")
        schedule = optim.schedule(optimizer, self.recipe.optim, self.total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        return batch.to(device)

    def on_train_start(self) -> None:
        self.train_mode()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch.bad and self.recipe.data.on_bad == "raise":
            raise batch.bad[0]
        seed_batch(self.recipe.train.seed, batch.number)
        loss = self._loss(batch)
        self._window.append(LossSum(loss.sum.detach(), loss.count, loss.logs))
        for at, amount in enumerate((len(batch.indices), batch.real, batch.padded, len(batch.bad))):
            self._consumed[at] += amount
        # Lightning divides by the accumulation; what has to be divided by is known only at the end of the window.
        return loss.sum * self.trainer.accumulate_grad_batches

    def _loss(self, batch: Batch) -> LossSum:
        """The loss of a batch; where nothing carries loss it is a zero that reaches the parameters all the same."""
        if batch.data is None:
            return LossSum(self._zero(), 0.0)
        total, count, logs = self(batch.data)
        if batch.indices and count:
            return LossSum(total, count, logs)
        together = hasattr(self.trainer.strategy, "gathered")  # all ranks have to run the backward pass, too
        return LossSum(total * 0.0 if together else self._zero(), 0.0)

    def forward(self, data: Any) -> tuple[Tensor, float, dict[str, float]]:
        """(sum, count, logs) of `loss`: what a sharded model is called by."""
        loss = self.loss(data)
        return loss.sum, loss.count, loss.logs

    def _zero(self) -> Tensor:
        """A zero that reaches every trained parameter, so that all ranks run the same backward pass."""
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.stack([parameter.flatten()[0] * 0.0 for parameter in parameters]).sum()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        # Lightning does so only after the next forward pass, so that they would lie beside all that this keeps.
        self.optimizer_zero_grad(epoch, batch_idx, self.trainer.optimizers[0])

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Divide the gradient by the window's count and clip it; drop it if it isn't finite or nothing carries loss."""
        loss, count, logs, consumed = self._close_window()
        # The ranks' gradients have been averaged: times their number it is the sum again.
        scale = self.data_rank[1] / count if count else 0.0
        usable = bool(count) and math.isfinite(loss)
        spike = usable and self.spikes.seen(loss / count)
        usable &= not (spike and self.spikes.skip)
        finish = getattr(self.trainer.strategy, "finish_gradients", gradients.finish)
        norm, applied = finish(optimizer, scale, self.recipe.optim.clip_norm, usable)
        self.last_step = StepResult(
            loss / count if count else 0.0,
            {name: value / count for name, value in logs.items()} if count else {},
            norm,
            not applied,
            count,
            int(consumed[0]),
            consumed[1],
            consumed[2],
            int(consumed[3]),
            optimizer.param_groups[0]["lr"],
            # A spike that was to be kept, and wasn't, has a broken gradient.
            "spike" if spike and applied != self.spikes.skip else _reason(count, applied),
            scale,
        )

    def _close_window(self) -> tuple[float, float, dict[str, float], list[float]]:
        """(loss sum, count, further sums, consumption) of the window over all ranks; starts a new window."""
        values = [
            sum(float(part.sum) for part in self._window),
            sum(part.count for part in self._window),
            *self._consumed,
            *(sum(part.logs.get(name, 0.0) for part in self._window) for name in self.log_names),
        ]
        if self.trainer.world_size > 1:
            gathered = torch.tensor(values, dtype=torch.float64, device=self.device)
            torch.distributed.all_reduce(gathered)
            same = self.trainer.world_size // self.data_rank[1]  # ranks that share layers have the same batch
            values = (gathered / same).tolist()
        self._window, self._consumed = [], [0.0] * 4
        return values[0], values[1], dict(zip(self.log_names, values[6:], strict=True)), values[2:6]

    # ------------------------------------------------------------------ checkpoint

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        trained = self.trained_names()
        checkpoint["state_dict"] = {name: value for name, value in checkpoint["state_dict"].items() if name in trained}
        checkpoint["spikes"] = self.spikes.state_dict()
        checkpoint.pop("loops", None)  # a resumed run is a run over the rest of the plan: our position is all it needs

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.train_mode()  # as it was when the names were saved: buffers count in train mode only
        optim.check_names(self, checkpoint["state_dict"])
        self.spikes.load_state_dict(checkpoint["spikes"])


def compile_layers(model: Any) -> None:
    """Compile a transformers model layer by layer, so that one compilation serves all of its layers.

    Args:
        model: names the classes of its layers in `_no_split_modules`, or has none to be compiled.
    """
    for module in model.modules():
        if type(module).__name__ in (getattr(model, "_no_split_modules", None) or ()):
            module.compile(dynamic=True)


def _reason(count: float, applied: bool) -> Literal["", "non_finite", "nothing"]:
    return "" if applied else "non_finite" if count else "nothing"


def _set_modes(module: nn.Module, parent: bool) -> None:
    parameters = list(module.parameters())
    mode = parent and (not parameters or any(parameter.requires_grad for parameter in parameters))
    module.training = mode
    for child in module.children():
        _set_modes(child, mode)
