"""What the online trainings share: rollouts at the right time, what resuming needs of them, and evaluation.

A training step is as ever a batch of the plan; before the first batch of a rollout its prompts are completed, judged
and compared. Completions are a function of (seed, rollout, prompt, number), so no generator has to be saved; what a
rollout that is not used up yet has drawn is part of a checkpoint.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from ....common.data.processing import Batch
from ....common.evaluation.each import Part
from ....common.evaluation.run import autocast
from ....common.task import LossSum, Predicted
from .. import harness
from ..losses.kl import divergence
from ..model import decode
from . import choose, evaluation, records
from .actors import Acting, Actor, Answering
from .engines.engine import Engine, Sampling
from .engines.http import HttpEngine
from .facts import facts
from .meter import Meter
from .plan import place_of
from .prompts import Asked, PromptProcessing
from .ranks import RanksTask
from .rollout import Drawer, Drawn, samples_of
from .samples import Samples, of_state
from .scores import scores
from .sections import SamplingSection

EVALUATION = 2**32 - 1
"""In the place of a rollout's number, in the keys of evaluations; of 32 bits, as NumPy joins the words of all parts."""


class OnlineTask(RanksTask):
    """Trains a causal language model, or an adapter of it, on its own completions. A subclass says what each is trained
    for (`assign`), and gives the loss."""

    metrics: ClassVar[dict[str, str]] = {"reward": "max"}
    meter_names: ClassVar[tuple[str, ...]] = ()
    """Names of what the loss adds to `self._meter`."""

    processing: PromptProcessing  # type: ignore[assignment]
    engine: Engine

    def __init__(self, recipe: Any, weights: Path | None = None):
        rewards = choose.rewards(recipe)  # first, as it may refuse the recipe
        super().__init__(recipe, weights)
        section = recipe.rollout
        self.engine = choose.engine(recipe, weights, self.causal, self._head)
        self._drawer = Drawer(self._actor(section), rewards, section.num_generations, self.resample)
        self._judge = Drawer(self._actor(recipe.evaluated), rewards, recipe.evaluate.answers)
        self._samples: dict[int, Samples] = {}  # of the rollout, by the batch's place in it
        self._facts: dict[str, float] = {}  # of the rollout, for the logs
        self._done: int | None = None  # number of the last batch
        self._given: int | None = None  # of the weights that the engine has
        self._meter = Meter(self.meter_names)
        self._folder: Path | None = None
        self._began = 0.0

    def _actor(self, section: SamplingSection) -> Actor:
        """What draws as a section says."""
        stops = tuple(self.generation_config().eos_token_id or ())
        sampling = Sampling(section.max_new_tokens, stops, section.temperature, section.top_p, section.top_k)
        environment = self.recipe.rollout.environment
        if environment is None:
            return Answering(self.engine, sampling, self.processing.tokenizer)
        return Acting(self.engine, sampling, self.processing.chat, environment, self.recipe.data.max_length)

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
    def need_not_fall(self) -> str:
        return "the examples are the model's own"

    def imagined(self, data: dict[str, Any]) -> dict[str, Any]:
        section, most = self.recipe.rollout, min(self.recipe.most_tokens, self.recipe.data.max_length - 1)
        # The prompts of an environment are not known: a token stands for each.
        prompts = [one.ids if len(one.ids) else np.zeros(1, np.int32) for one in data["prompts"]]
        number = len(prompts) * section.num_generations
        tokens = number * most
        lengths = torch.tensor([len(one) for one in prompts])
        groups = torch.full((len(prompts),), section.num_generations)
        every, whole = torch.ones(number, dtype=torch.bool), torch.ones(tokens, dtype=torch.bool)
        each = torch.full((number,), most)
        said = torch.zeros(tokens, dtype=torch.int32)
        joined = torch.from_numpy(np.concatenate(prompts).astype(np.int32))
        unknown = [torch.full((tokens,), torch.nan) for _ in range(4)]
        zeros = torch.zeros(tokens)
        return self._joined(Samples(joined, lengths, groups, each, said, whole, zeros, zeros, every, every, *unknown))

    def held_in_rollouts(self, data: dict[str, Any]) -> int:
        if self.engine.gathers != "nothing":  # they are held elsewhere
            return 0
        section, config = self.recipe.rollout, self.causal.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        values = 2 * config.num_hidden_layers * heads * width * self.causal.dtype.itemsize
        prompts = [len(one.ids) or self.recipe.data.max_length for one in data["prompts"]]  # of environments: not known
        drawn = min(section.batch, len(prompts) * section.num_generations)
        return int(values * drawn * min(max(prompts) + self.recipe.most_tokens, self.recipe.data.max_length))

    @property
    def resample(self) -> int:
        """How often a prompt is completed anew while its completions are all worth the same."""
        return 0

    def assign(self, drawn: Sequence[Sequence[Drawn]], samples: Sequence[Samples]) -> None:
        """Set what each completion is trained for, and which are: `advantages`, `used` and `counted`.

        Args:
            drawn: prompts with their completions, of each batch.
            samples: of the same batches.
        """
        raise NotImplementedError

    # ------------------------------------------------------------------ a training step

    def look_ahead(self, examples: Sequence[Any], folder: Path) -> None:
        self._folder = folder
        if isinstance(self.engine, HttpEngine):
            self.engine.folder = folder / choose.WEIGHTS

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        if not self._began:
            self._began = time.monotonic()
        first, passed, place = self._place(batch.number)
        if passed == 0 and place == self.data_rank[0]:
            self._roll([batch, *batch.ahead], first)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        samples = self._samples[self._place(batch.number)[2]]
        batch.data = self._joined(samples)
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
        means = self._meter.close(self.device, self.is_split, self.ranks_alike)
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
        """See that the engine has the weights as they are now; all ranks do this together, outside of `gathered`."""
        if self._given == version:
            return
        gathers = self.engine.gathers
        with nullcontext() if gathers == "nothing" else self.gathered(to_save=gathers == "first"):
            self.engine.update(version, self)
        self._given = version

    def _joined(self, samples: Samples) -> dict[str, Any]:
        """What the model is trained on of a batch of prompts."""
        made = samples.joined()
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
        keys = [(self.recipe.train.seed, number) for number in range(len(data["prompts"]))]
        self._weigh_in(0)
        with self._acting():
            samples = samples_of(self._drawer.draw(data["prompts"], keys, 0))
        samples.used[:] = samples.counted[:] = True
        signs = 1.0 - 2.0 * (torch.arange(len(samples.used)) % 2)
        samples.advantages = signs.repeat_interleave(samples.lengths)
        return self._joined(samples)

    # ------------------------------------------------------------------ a rollout

    def _roll(self, batches: Sequence[Batch], first: int) -> None:
        """Draw and judge the completions of all batches of a rollout that this rank has."""
        rank, ranks = self.data_rank
        version = first // self._per_step
        self._weigh_in(version)
        with self._acting():
            drawn = self._drawn(batches, first, version)
            samples = [samples_of(part) for part in drawn]
            self.assign(drawn, samples)
            for made in samples[self.trainer.accumulate_grad_batches :]:
                if made.lacks("old"):  # when these are trained on, the policy will have moved
                    self.fill(made, "old")
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

    def fill(self, samples: Samples, name: Literal["old", "reference"]) -> None:
        """Compute the log-probabilities of all completions under the policy (`old`) or the `reference`."""
        made = self.whole(samples)
        found = self.reference_of(made) if name == "reference" else self.policy_of(made)[0]
        getattr(samples, name)[made["host"]] = found.float().cpu()

    def whole(self, samples: Samples) -> dict[str, Any]:
        """A row of all completions, also of those that are not used."""
        return self._joined(replace(samples, used=torch.ones_like(samples.used)))

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

    def penalties(self, samples: Samples, kl: Any) -> np.ndarray:
        """[N] what is taken from the reward for each token: a KL with `weight` and `estimator`, or None for nothing."""
        if kl is None or not kl.weight:
            return np.zeros(len(samples.tokens))
        self.fill(samples, "reference")
        found = kl.weight * divergence(samples.engine, samples.reference, kl.estimator)
        return torch.where(samples.trained, found, 0.0).double().numpy()

    def old_of(self, made: dict[str, Any], own: Tensor) -> Tensor:
        """[R] log-probabilities before the policy has moved; where it has not, its own [R]: a ratio of exactly 1."""
        if made["old"] is not None:
            found: Tensor = made["old"]
            return found
        if self.recipe.rollout.iterations > 1:
            made["samples"].old[made["host"]] = own.detach().float().cpu()
        return own.detach()

    def with_router(self, total: Tensor, count: float, out: Any) -> LossSum:
        """The loss with the experts' own, if the model has one."""
        if not self._router_weight:
            return LossSum(total, count)
        router = self._router_loss(out.router_logits) * count
        return LossSum(total + self._router_weight * router, count, {"router": float(router.detach())})

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
        found = {number: rows for part in self.from_all(told) for number, rows in part.items()}
        if self.trainer.is_global_zero and found:
            records.write(self._folder, rollout, [row for number in sorted(found) for row in found[number]])

    # ------------------------------------------------------------------ checkpoint

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self._done is None or self._place(self._done)[0] != self._place(self._done + self.data_rank[1])[0]:
            return  # the next batch begins a rollout
        parts = self.from_all({place: one.state() for place, one in self._samples.items()})
        every = {place: state for part in parts for place, state in part.items()}
        checkpoint["rollout"] = {"samples": every, "facts": self._facts}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if kept := checkpoint.get("rollout"):
            self._samples = {place: of_state(state) for place, state in kept["samples"].items()}
            self._facts = kept["facts"]

    # ------------------------------------------------------------------ evaluation

    def _now(self) -> int:
        """Version of the weights as they are now."""
        return 0 if self._done is None else self._done // self._per_step + 1

    def before_evaluation(self) -> None:
        self._weigh_in(self._now())

    @torch.no_grad()
    def predict(self, batch: Batch) -> Predicted:
        """The answers of the model to the prompts, judged."""
        version = self._now()
        self._weigh_in(version)  # which it has been by now, but where an export tries the model
        keys = [(self.recipe.train.seed, EVALUATION, number) for number in batch.indices]
        drawn = self._judge.draw(batch.data["prompts"], keys, version)
        return Predicted([evaluation.judged(one, self.processing.tokenizer) for one in drawn])

    def means(self, records: Sequence[Any]) -> dict[str, Any]:
        section = self.recipe.evaluate
        return evaluation.means(records, section.pass_at, section.pass_reward)

    def parts(self, record: Any) -> dict[str, Part]:
        return evaluation.parts(record, self.recipe.evaluate.pass_at, self.recipe.evaluate.pass_reward)

    def samples(self, records: Sequence[Any], number: int) -> list[dict[str, Any]]:
        return evaluation.shown(records, number)
