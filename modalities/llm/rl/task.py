"""What the online trainings share: rollouts at the right time, what resuming needs of them, and evaluation.

A training step is as ever a batch of the plan; before the first batch of a rollout its prompts are completed, judged
and compared. Completions are a function of (seed, rollout, prompt, number), so no generator has to be saved; what a
rollout that is not used up yet has drawn is part of a checkpoint.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ....common.data.processing import Batch
from ....common.evaluation.run import autocast
from ....common.task import Predicted
from .. import harness
from ..model import decode
from ..policy import PolicyTask
from . import evaluation, records
from .engines.engine import Engine, Sampling
from .engines.local import LocalEngine
from .facts import facts
from .meter import Meter
from .plan import place_of
from .prompts import Asked, PromptProcessing
from .rewards.rewards import Rewards
from .rollout import Drawer, Drawn, samples_of
from .samples import Samples, of_state
from .scores import scores

EVALUATION = 2**32
"""In the place of a rollout's number, in the keys of evaluations."""


class OnlineTask(PolicyTask):
    """Trains a causal language model, or an adapter of it, on its own completions. A subclass says what each is trained
    for (`assign`), and gives the loss."""

    metrics: ClassVar[dict[str, str]] = {"reward": "max"}
    meter_names: ClassVar[tuple[str, ...]] = ()
    """Names of what the loss adds to `self._meter`."""

    processing: PromptProcessing
    engine: Engine

    def __init__(self, recipe: Any, weights: Path | None = None):
        rewards = Rewards(recipe.rewards)  # first, as it may refuse the recipe
        super().__init__(recipe, weights)
        section = recipe.rollout
        self.engine = LocalEngine(self.causal, self._head, section.batch)
        stops = tuple(self.generation_config().eos_token_id or ())
        tokenizer = self.processing.tokenizer
        self._drawer, self._judge = (
            Drawer(self.engine, rewards, tokenizer, _sampling(one, stops), number, again)
            for one, number, again in (
                (section, section.num_generations, self.resample),
                (recipe.evaluated, recipe.evaluate.answers, 0),
            )
        )
        self._samples: dict[int, Samples] = {}  # of the rollout, by the batch's place in it
        self._facts: dict[str, float] = {}  # of the rollout, for the logs
        self._done: int | None = None  # number of the last batch
        self._given: int | None = None  # of the weights that the engine has
        self._meter = Meter(self.meter_names)
        self._folder: Path | None = None
        self._began = 0.0

    @classmethod
    def make_processing(cls, recipe: Any, weights: Path | None = None) -> PromptProcessing:  # type: ignore[override]
        return PromptProcessing(recipe, weights)

    @classmethod
    def metrics_of(cls, recipe: Any) -> dict[str, str]:
        """Rewards, pass@k, and the benchmarks."""
        own = evaluation.names([one.label for one in recipe.rewards], recipe.evaluate.pass_at)
        return {**own, **harness.names(recipe.evaluate.harness)}

    @property
    def precomputes(self) -> bool:
        return False

    @property
    def resample(self) -> int:
        """How often a prompt is completed anew while its completions are all worth the same."""
        return 0

    def assign(self, drawn: Sequence[Sequence[Drawn]], samples: Sequence[Samples], datas: Sequence[Any]) -> None:
        """Set what each completion is trained for, and which are: `advantages`, `used` and `counted`.

        Args:
            drawn: prompts with their completions, of each batch.
            samples: of the same batches.
            datas: of the same batches; they hold `prompts`.
        """
        raise NotImplementedError

    # ------------------------------------------------------------------ a training step

    def look_ahead(self, examples: Sequence[Any], folder: Path) -> None:
        self._folder = folder

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        if not self._began:
            self._began = time.monotonic()
        first, passed, place = self._place(batch.number)
        if passed == 0 and place == self.data_rank[0]:
            self._roll([batch, *batch.ahead], first)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        samples = self._samples[self._place(batch.number)[2]]
        batch.data = self._joined(samples, batch.data)
        batch.real = batch.padded = float(len(batch.data["input_ids"]))
        loss = super().training_step(batch, batch_idx)
        self._done = batch.number
        return loss

    def configure_gradient_clipping(self, *arguments: Any, **named: Any) -> None:
        super().configure_gradient_clipping(*arguments, **named)
        now = time.monotonic()
        spent = self._drawer.clock
        seconds = {"seconds_rollout": spent.drawing, "seconds_reward": spent.rewarding}
        seconds["seconds_training"] = now - self._began - spent.drawing - spent.rewarding
        spent.drawing = spent.rewarding = 0.0
        self._began = now
        means = self._meter.close(self.device, self._is_split, self._same)
        self.last_step.logs.update({**self._facts, **means, **seconds})

    @property
    def _per_step(self) -> int:
        """Batches of an optimizer step, over all ranks."""
        return int(self.trainer.accumulate_grad_batches * self.data_rank[1])

    @property
    def _size(self) -> int:
        """Batches of a rollout, over all ranks."""
        return int(self.recipe.rollout.steps * self._per_step)

    def _place(self, number: int) -> tuple[int, int, int]:
        """(first batch of its rollout, pass, place in the pass) of a batch."""
        return place_of(number, self._size, self.recipe.rollout.iterations)

    def _number(self, first: int) -> int:
        """The number of the rollout that begins with a batch."""
        return first // (self._size * int(self.recipe.rollout.iterations))

    def _weigh_in(self, version: int) -> None:
        """See that the engine has the weights as they are now."""
        if self._given != version:
            self.engine.update(version, self)
            self._given = version

    def _joined(self, samples: Samples, data: dict[str, Any]) -> dict[str, Any]:
        """What the model is trained on of a batch of prompts."""
        made = samples.joined([one.ids for one in data["prompts"]])
        for name in ("old", "reference"):
            if len(made[name]) and bool(made[name].isnan().any()):
                made[name] = None  # not known yet
        counts = made["counts"][made["counted"] > 0]
        idle = samples.unused()
        whole = {"completions": len(counts) + idle[0], "tokens": int(counts.sum()) + idle[1]}
        device = self.causal.device
        moved = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in made.items()}
        return {**moved, **whole, "samples": samples, "host": made["at"]}

    def completed(self, data: dict[str, Any]) -> dict[str, Any]:
        """What the model is trained on of a batch. One of prompts alone, with which `luthier check` tries a step, is
        completed first, and all of its completions are trained, so that the step is as large as one may be."""
        if "samples" in data:
            return data
        with self._acting():
            keys = [(self.recipe.train.seed, number) for number in range(len(data["prompts"]))]
            self._weigh_in(0)
            samples = samples_of(self._drawer.draw(data["prompts"], keys, 0))
        samples.used[:] = samples.counted[:] = True
        signs = 1.0 - 2.0 * (torch.arange(len(samples.used)) % 2)
        samples.advantages = signs.repeat_interleave(samples.lengths)
        return self._joined(samples, data)

    # ------------------------------------------------------------------ a rollout

    def _roll(self, batches: Sequence[Batch], first: int) -> None:
        """Draw and judge the completions of all batches of a rollout that this rank has."""
        rank, ranks = self.data_rank
        version, datas = first // self._per_step, [batch.data for batch in batches]
        self._weigh_in(version)
        with self._acting():
            drawn = self._drawn(batches, first, version)
            samples = [samples_of(part) for part in drawn]
            self.assign(drawn, samples, datas)
            later = self.trainer.accumulate_grad_batches  # when these are trained on, the policy will have moved
            for made, data in zip(samples[later:], datas[later:], strict=True):
                self.fill(made, data, "old")
        self._samples = {rank + at * ranks: made for at, made in enumerate(samples)}
        self._tell(drawn, samples, batches, first)

    def _drawn(self, batches: Sequence[Batch], first: int, version: int) -> list[list[Drawn]]:
        """Of each batch its prompts with their completions; a stand-in, in a batch without examples, has no reward."""
        prompts: list[Asked] = []
        keys: list[tuple[int, ...]] = []
        seen: Counter[int] = Counter()
        for batch in batches:
            numbers = batch.indices or (-1,) * len(batch.data["prompts"])
            for asked, number in zip(batch.data["prompts"], numbers, strict=True):
                prompts.append(asked)
                keys.append((self.recipe.train.seed, self._number(first), number + 1, seen[number]))
                seen[number] += 1
        found = self._drawer.draw(prompts, keys, version)
        parts = []
        for batch in batches:
            part, found = found[: len(batch.data["prompts"])], found[len(batch.data["prompts"]) :]
            if not batch.indices:
                for one in part:
                    one.rewards = np.full_like(one.rewards, np.nan)
            parts.append(part)
        return parts

    @contextmanager
    def _acting(self) -> Iterator[None]:
        """All of the model on this rank, in evaluation mode, in the precision of the training and without gradients."""
        modes = {module: module.training for module in self.modules()}
        self.eval()
        try:
            with torch.no_grad(), self.gathered(), autocast(self.recipe.train.precision, self.device):
                yield
        finally:
            for module, mode in modes.items():
                module.training = mode

    def fill(self, samples: Samples, data: dict[str, Any], name: str) -> None:
        """Compute the log-probabilities of all completions under the policy (`old`) or the `reference`."""
        used, samples.used = samples.used, torch.ones_like(samples.used)
        made = self._joined(samples, data)
        samples.used = used
        found = self.reference_of(made) if name == "reference" else self.policy_of(made)[0]
        getattr(samples, name)[made["host"]] = found.float().cpu()

    def policy_of(self, made: dict[str, Any], with_entropy: bool = False) -> tuple[Tensor, Tensor, Any]:
        """([R] log-probability of each token, [R] entropy of its distribution, the decoder's output)."""
        out = self._run(made)
        hidden = out.last_hidden_state[0][made["places"]]
        found = scores(self._head, hidden, made["labels"], self.recipe.rollout.temperature, with_entropy)
        return *found, out

    @torch.no_grad()
    def reference_of(self, made: dict[str, Any]) -> Tensor:
        """[R] log-probability of each token under the reference."""
        with self._as_reference() as (causal, head):
            hidden = decode(causal, made).last_hidden_state[0][made["places"]]
            return scores(head, hidden, made["labels"], self.recipe.rollout.temperature)[0]

    # ------------------------------------------------------------------ over all ranks

    def total(self, values: np.ndarray) -> np.ndarray:
        """The sum over all ranks."""
        if not self._is_split:
            return values
        found = torch.from_numpy(np.asarray(values, dtype=np.float64)).to(self.device)
        torch.distributed.all_reduce(found)
        return np.asarray((found / self._same).cpu().numpy())

    @property
    def _is_split(self) -> bool:
        return self._trainer is not None and self.trainer.world_size > 1

    @property
    def _same(self) -> int:
        """Ranks that share layers, and so have the same batches."""
        return self.trainer.world_size // self.data_rank[1] if self._is_split else 1

    def _from_all(self, value: Any) -> list[Any]:
        """A value of each rank."""
        if not self._is_split:
            return [value]
        found: list[Any] = [None] * self.trainer.world_size
        torch.distributed.all_gather_object(found, value)
        return found

    # ------------------------------------------------------------------ what is told of a rollout

    def _tell(
        self, drawn: Sequence[Sequence[Drawn]], samples: Sequence[Samples], batches: Sequence[Batch], first: int
    ) -> None:
        """Keep what is logged of a rollout, and write its completions."""
        real = [
            (part, made, batch.number)
            for part, made, batch in zip(drawn, samples, batches, strict=True)
            if batch.indices
        ]
        every = [one for part, _, _ in real for one in part]
        self._facts = facts(every, [made for _, made, _ in real], self._drawer.rewards.names, self.total)
        if not self.recipe.rollout.record or self._folder is None:
            return
        rollout, step = self._number(first), first // self._per_step
        told = {
            number: records.rows(part, made, self.processing.tokenizer, rollout, step) for part, made, number in real
        }
        found = {number: rows for part in self._from_all(told) for number, rows in part.items()}
        if self.trainer.is_global_zero and found:
            records.write(self._folder, rollout, [row for number in sorted(found) for row in found[number]])

    # ------------------------------------------------------------------ checkpoint

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self._done is None or self._place(self._done)[0] != self._place(self._done + self.data_rank[1])[0]:
            return  # the next batch begins a rollout
        parts = self._from_all({place: one.state() for place, one in self._samples.items()})
        every = {place: state for part in parts for place, state in part.items()}
        checkpoint["rollout"] = {"samples": every, "facts": self._facts}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if kept := checkpoint.get("rollout"):
            self._samples = {place: of_state(state) for place, state in kept["samples"].items()}
            self._facts = kept["facts"]

    # ------------------------------------------------------------------ evaluation

    @torch.no_grad()
    def predict(self, batch: Batch) -> Predicted:
        """The answers of the model to the prompts, judged."""
        version = 0 if self._done is None else self._done // self._per_step + 1
        self._weigh_in(version)
        keys = [(self.recipe.train.seed, EVALUATION, number) for number in batch.indices]
        drawn = self._judge.draw(batch.data["prompts"], keys, version)
        return Predicted([evaluation.judged(one, self.processing.tokenizer) for one in drawn])

    def means(self, records: Sequence[Any]) -> dict[str, Any]:
        section = self.recipe.evaluate
        return evaluation.means(records, section.pass_at, section.pass_reward)

    def samples(self, records: Sequence[Any], number: int) -> list[dict[str, Any]]:
        return evaluation.shown(records, number)


def _sampling(section: Any, stops: tuple[int, ...]) -> Sampling:
    return Sampling(section.max_new_tokens, stops, section.temperature, section.top_p, section.top_k)
