"""The text-to-image task: loss, comparable validation, sample pictures, saving."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ....common import task
from ....common.data.processing import Batch
from ....common.evaluation.each import Each
from ....common.evaluation.run import autocast
from ....common.task import LossSum, Predicted
from .. import adapters, class_images, clip, losses, noise, timesteps
from ..ema import Average
from ..families import Conditions
from ..model import latents, load
from ..sampling import png, sampled, side_by_side
from .config import Config
from .frozen import Frozen
from .parts import Parts
from .processing import ImageProcessing


@dataclass(frozen=True)
class Judged:
    """One picture of an evaluation.

    Args:
        where: file and row.
        losses: mean squared error at each of the fixed noise levels [K].
        fields: its slices.
    """

    where: str
    losses: tuple[float, ...]
    fields: Mapping[str, Any]


class Task(task.Task):
    """Trains a text-to-image model: an adapter, new words, or its denoiser."""

    metrics: ClassVar[dict[str, str]] = {"loss": "min", **clip.METRICS}

    recipe: Config
    processing: ImageProcessing
    model: nn.ModuleDict

    def __init__(self, recipe: Config, weights: Path | None = None):
        super().__init__(recipe, weights)
        self.processing = self.make_processing(recipe, weights)
        self.family = self.processing.known.family
        self.parts = Parts(recipe, self.processing.known, weights)
        self.model = nn.ModuleDict(self.parts.trained())
        self.pipe = self.parts.pipe
        self.frozen = Frozen(recipe, self.parts, self.processing.cache)
        self.vae_config = dict(self.pipe.vae.config)
        self.kind, self.products = _schedule(self.pipe.scheduler, self.family.flow)
        self.average: Average | None = None
        if recipe.model.ema is not None:
            self.average = Average([p for p in self.model.parameters() if p.requires_grad], recipe.model.ema)
        self._base_pictures: list[Any] | None = None
        self._pictures: list[Any] = []

    @classmethod
    def make_processing(cls, recipe: Config, weights: Path | None = None) -> ImageProcessing:
        processing = ImageProcessing.of(recipe)
        if recipe.data.prior and weights is None:
            if len(class_images.present(recipe.data.prior)) < recipe.data.prior.number:
                known, size = processing.known, recipe.data.image.resolution
                class_images.fill(recipe.data.prior, load(known), known.family, size)
            processing.load_prior()
        return processing

    @classmethod
    def metrics_of(cls, recipe: Any) -> dict[str, str]:
        scored = recipe.evaluate.sampling is not None and recipe.evaluate.sampling.clip is not None
        return cls.metrics if scored else {"loss": "min"}

    def compile_parts(self) -> None:
        self.parts.denoiser.compile()

    # ------------------------------------------------------------------ loss

    def loss(self, data: dict[str, Any]) -> LossSum:
        """Weighted mean squared error of each picture, summed; it counts pictures."""
        clean = latents(self.vae_config, self.frozen.moments(data), self.recipe.task.latents == "sample")
        conditions = self.frozen.conditions(data, self.device)
        section = self.recipe.task
        drawn = noise.drawn(clean, section.noise)
        levels = timesteps.drawn(len(clean), section.timesteps, clean.device)
        if self.family.flow:
            levels = timesteps.shifted(levels, self._shift(clean))
        squares, levels = self.denoised(clean, conditions, drawn, levels, data["mask"], section.noise.perturbation)
        each = squares * self._weights(levels)
        if self.recipe.data.prior is not None and data["examples"] < len(each):
            prior = self.recipe.data.prior
            total, count = losses.preserved(each, data["examples"], prior.weight, prior.meaning)
            return LossSum(total, count)
        return LossSum(each.sum(), float(len(each)))

    def denoised(
        self,
        clean: Tensor,
        conditions: Conditions,
        drawn: Tensor,
        levels: Tensor,
        mask: Tensor | None = None,
        perturbation: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """(mean squared error [B], levels or steps that were used [B]).

        Args:
            clean: latents [B, C, h, w].
            conditions: of the captions.
            drawn: noise [B, C, h, w].
            levels: shares of noise [B] in [0, 1].
            mask: weight of each place [B, 1, h, w].
            perturbation: size of noise on the input that is not in the target.
        """
        added = noise.perturbed(drawn, perturbation)
        if self.family.flow:
            noisy, target, times = losses.flowed(clean, added, levels), losses.flow_target(clean, drawn), levels * 1000
        else:
            products = self.products.to(clean.device)
            levels = times = timesteps.steps(levels, len(products))
            noisy = losses.diffused(clean, added, products, times)
            target = losses.diffusion_target(self.kind, clean, drawn, products, times)
        if self.recipe.train.precision == "bf16-true":
            noisy = noisy.to(torch.bfloat16)
            conditions = {k: v if k == "sizes" else v.to(torch.bfloat16) for k, v in conditions.items()}
        said = self.family.predict(self.parts.denoiser, noisy, times, conditions, self.recipe.task.guidance)
        return losses.each_mse(said, target, mask), levels

    def _weights(self, levels: Tensor) -> Tensor:
        section = self.recipe.task.weight
        if self.family.flow:
            return losses.flow_weights(section.kind, levels)
        ratio = losses.snr(self.products.to(levels.device), levels)
        return losses.diffusion_weights(section.kind, section.gamma, ratio, self.kind)

    def _shift(self, clean: Tensor) -> float:
        """The shift towards noise of flow matching, for latents of this size."""
        given = self.recipe.task.timesteps.shift
        side = self.family.patch
        tokens = clean.shape[-1] // side * (clean.shape[-2] // side)
        return timesteps.scheduler_shift(self.pipe.scheduler.config, tokens) if given == "scheduler" else given

    # ------------------------------------------------------------------ steps

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.average is not None and not self.last_step.skipped:
            self.average.update()

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        with nullcontext() if self.average is None else self.average.applied():
            yield

    # ------------------------------------------------------------------ evaluation

    def predict(self, batch: Batch) -> Predicted:
        """Mean squared errors at fixed noise levels with fixed noise, which follow from the picture alone: evaluations
        can be compared, within a run and between runs. No weights of noise levels, no draws, no dropout."""
        data = batch.data
        with self._averaged():
            clean = latents(self.vae_config, self.frozen.moments(data), sample=False)
            conditions = self.frozen.conditions(data, self.device)
            columns = []
            for number, level in enumerate(timesteps.fixed(self.recipe.evaluate.timesteps)):
                fixed = [noise.fixed(tuple(clean.shape[1:]), (seed + number) % 2**63) for seed in data["seeds"]]
                drawn = torch.stack(fixed).to(clean)
                levels = level.to(clean.device).expand(len(clean))
                columns.append(self.denoised(clean, conditions, drawn, levels, data["mask"])[0])
        table = torch.stack(columns, dim=1).double().cpu()
        wanted = self.recipe.evaluate.slices
        records = []
        for picture, row in zip(data["pictures"], table.tolist(), strict=True):
            fields = {"source": picture.source, **picture.fields}
            kept = {name: fields[name] for name in wanted if fields.get(name) is not None}
            records.append(Judged(picture.where, tuple(row), kept))
        return Predicted(records, LossSum(table.mean(1).sum(), float(len(table))))

    def score(self, records: Sequence[Any]) -> dict[str, Any]:
        """Mean loss, by noise level and by the fields asked for; pictures are made here, as CLIP scores them."""
        slices: dict[str, dict[str, Any]] = defaultdict(dict)
        for number, level in enumerate(timesteps.fixed(self.recipe.evaluate.timesteps).tolist()):
            slices["noise"][f"{level:.1%}"] = _mean([record.losses[number : number + 1] for record in records])
        groups: dict[str, dict[str, list[tuple[float, ...]]]] = defaultdict(lambda: defaultdict(list))
        for record in records:
            for name, value in record.fields.items():
                groups[name][str(value)].append(record.losses)
        for name, values in groups.items():
            slices[name] = {value: _mean(rows) for value, rows in sorted(values.items())}
        found: dict[str, Any] = {**_mean([record.losses for record in records]), "slices": dict(slices)}
        section = self.recipe.evaluate.sampling
        if section is not None:
            self._pictures = self._sampled()
            if section.clip is not None:
                found |= clip.scores(section.clip, self._pictures, section.prompts, self.device)
        return found

    def each(self, records: Sequence[Any]) -> list[Each]:
        return [Each(one.where, {"loss": (sum(one.losses) / len(one.losses), 1.0)}, one.fields) for one in records]

    def samples(self, records: Sequence[Any], number: int) -> list[dict[str, Any]]:
        """The pictures of the last evaluation as PNG files, on the left the base model's where there is one."""
        section = self.recipe.evaluate.sampling
        if section is None:
            return []
        shown = []
        for at, (prompt, picture) in enumerate(zip(section.prompts, self._pictures, strict=True)):
            whole = side_by_side(self._base_pictures[at], picture) if self._base_pictures else picture
            left = {"left": "the base model's"} if self._base_pictures else {}
            shown.append({"prompt": prompt, "seed": section.seed + at, "picture": png(whole), **left})
        return shown[:number]

    def _sampled(self) -> list[Any]:
        """Pictures of the model as it is; at the first call also the base model's."""
        section, side = self.recipe.evaluate.sampling, self.recipe.data.image.resolution
        assert section is not None
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        self.frozen.place(self.device)
        seeds = [section.seed + at for at in range(len(section.prompts))]
        options: dict[str, Any] = {
            "steps": section.steps, "guidance": section.guidance, "width": section.width or side,
            "height": section.height or side, "negative": section.negative, "pieces": self.recipe.data.captions.chunks,
        }  # fmt: skip
        try:
            with torch.no_grad(), autocast(self.recipe.train.precision, self.device):
                if self._base_pictures is None and self.parts.adapted:
                    with adapters.switched_off(self.parts.with_adapters()):
                        self._base_pictures = sampled(self.pipe, self.family, section.prompts, seeds, **options)
                with self._averaged():
                    return sampled(self.pipe, self.family, section.prompts, seeds, **options)
        finally:
            for module, mode in modes.items():
                module.training = mode

    # ------------------------------------------------------------------ saving

    def save_pretrained(self, directory: Path) -> None:
        with self._averaged():
            self.parts.save(directory)

    def exportable(self) -> Any:
        from .export import ImageExport

        return ImageExport(self)


def _mean(rows: Sequence[Sequence[float]]) -> dict[str, Any]:
    values = [sum(row) / len(row) for row in rows]
    return {"loss": sum(values) / max(1, len(values)), "pictures": len(values)}


def _schedule(scheduler: Any, flow: bool) -> tuple[str, Tensor]:
    """(what is predicted, cumulative products a [number of steps]) that the model was trained with; none for flow."""
    if flow:
        return "velocity", torch.empty(0)
    from diffusers import DDPMScheduler

    training = DDPMScheduler.from_config(scheduler.config)
    return training.config.prediction_type, training.alphas_cumprod
