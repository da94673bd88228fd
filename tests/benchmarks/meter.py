"""Speed and memory of a training: what a Lightning callback sees after the first steps, which warm up."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback

WARMUP = 2


class Meter(Callback):
    """Times optimizer steps from the end of the warm-up to the end of the last, and the peak of resident memory.

    `examples`, `real` and `padded` (in the modality's unit) and `trained` (what carried loss) are what the timed steps
    contained. `compute_share` is the part from the begin of the forward pass to the end of the optimizer's step: the
    rest is the making of batches, and what follows a step. `first_step_after`: seconds from the start of the process to
    the end of its first step.

    Args:
        warmup: steps that are not timed.
    """

    def __init__(self, warmup: int = WARMUP) -> None:
        self.warmup = warmup
        self.ends: list[float] = []
        self.examples, self.real, self.padded, self.trained = 0, 0.0, 0.0, 0.0
        self.cpu = self.others = 0.0
        self.began = self.computed = 0.0
        self.losses: list[float] = []
        self.first = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # First of all callbacks: the last step saves, which the peers don't do and is not timed there either.
        trainer.callbacks.remove(self)
        trainer.callbacks.insert(0, self)
        with suppress(OSError):  # restart the kernel's high-water mark: preparation does not count
            Path("/proc/self/clear_refs").write_text("5")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if len(self.ends) >= self.warmup:
            self.computed += time.perf_counter() - self.began
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        if not self.ends:
            self.first = time.time() - psutil.Process().create_time()
        self.losses.append(pl_module.last_step.loss)
        self.ends.append(time.perf_counter())
        if len(self.ends) == self.warmup:
            self.cpu, self.others = time.process_time(), _machine_cpu()
        elif len(self.ends) > self.warmup:
            step = pl_module.last_step
            self.examples += step.items
            self.real += step.real
            self.padded += step.padded
            self.trained += step.count

    def report(self) -> dict[str, Any]:
        seconds = self.ends[-1] - self.ends[self.warmup - 1]
        cpu = time.process_time() - self.cpu
        return {
            "items": self.examples,
            "seconds": round(seconds, 3),
            "items_per_second": self.examples / seconds,
            "trained_tokens": self.trained,
            "real_per_second": self.real / seconds,
            "compute_share": self.computed / seconds,
            "first_step_after": self.first,
            "loss_first": self.losses[0],
            "loss_last": self.losses[-1],
            "padding_share": 1 - self.real / self.padded,
            "peak_rss_mb": round(_peak_mb()),
            "cpu_seconds": round(cpu, 1),
            "other_cpu_seconds": round(max(0.0, _machine_cpu() - self.others - cpu), 1),
        }


class Done(Exception):
    """The last timed step is over: raised before the run would save."""


class DeviceMeter(Meter):
    """Waits for the device where it looks at the clock, and ends the training.

    Args:
        warmup: steps that are not timed.
        steps: that are.
    """

    def __init__(self, warmup: int, steps: int) -> None:
        super().__init__(warmup)
        self.steps = steps

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if len(self.ends) == self.warmup + self.steps:
            raise Done


def _machine_cpu() -> float:
    """CPU seconds spent by every process since boot."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def _peak_mb() -> float:
    status = Path("/proc/self/status")
    for row in status.read_text().splitlines() if status.exists() else ():
        if row.startswith("VmHWM:"):
            return int(row.split()[1]) / 1024
    return float(psutil.Process(os.getpid()).memory_info().rss) / 1e6
