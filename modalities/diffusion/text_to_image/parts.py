"""Which parts of a pipeline are trained: adapters, new words, or the denoiser itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ....common.quantized import quantise
from ....common.record import model_hash
from .. import adapters, tokens
from ..model import Facts, facts, load, modules
from ..sections import ImageLora
from .config import Config

BASE = "base_model.json"


class Parts:
    """A pipeline made ready for training. It holds all parts; those that are trained, and the denoiser, are `trained`.

    Args:
        recipe: which parts are trained, and how.
        known: facts of the pipeline to start from.
        weights: directory that `save` wrote, to go on with.
    """

    def __init__(self, recipe: Config, known: Facts, weights: Path | None = None):
        from ..attention import by_length

        self.recipe, self.known, self.family = recipe, known, known.family
        section = recipe.model
        self.adapted: dict[str, ImageLora] = {}
        if section.lora:
            self.adapted[self.family.denoiser] = section.lora
        if section.text_encoder_lora:
            self.adapted |= dict.fromkeys(self.family.clip_encoders, section.text_encoder_lora)
        self.whole = section.lora is None and not section.freeze_denoiser
        start = facts(str(weights)) if weights is not None and self.whole else known
        lower = recipe.train.precision.startswith("bf16") and not section.trains_text
        self.pipe = load(start, torch.bfloat16 if lower else torch.float32)
        by_length(self.denoiser)
        self._prepare(weights)

    def _prepare(self, weights: Path | None) -> None:
        section, denoiser, precision = self.recipe.model, self.denoiser, self.recipe.train.precision
        if section.quantization != "none":
            quantise(denoiser, precision, section.lora is not None)
        for name, adapter in self.adapted.items():
            where = "model.lora" if name == self.family.denoiser else "model.text_encoder_lora"
            adapters.put_in(modules(self.pipe)[name], adapter, where)
        if section.new_tokens:
            tokens.add(self.pipe, self.family, section.new_tokens)
        if self.whole:
            denoiser.requires_grad_(True)
        if weights is not None:
            self._restore(weights)
        if precision == "bf16-mixed" and section.lora and adapters.is_plain(section.lora):
            adapters.lower_base(denoiser, torch.bfloat16)
        if self.recipe.train.gradient_checkpointing:
            denoiser.enable_gradient_checkpointing()

    def _restore(self, weights: Path) -> None:
        if self.adapted:
            adapters.restore(self.with_adapters(), self.adapted, weights)
        if self.recipe.model.new_tokens:
            tokens.restore(self.pipe, self.family, self.recipe.model.new_tokens, weights)

    @property
    def denoiser(self) -> Any:
        """The part that says what the noise is."""
        return modules(self.pipe)[self.family.denoiser]

    def with_adapters(self) -> dict[str, nn.Module]:
        """The parts that have adapters, by name."""
        return {name: modules(self.pipe)[name] for name in self.adapted}

    def trained(self) -> dict[str, nn.Module]:
        """What the task registers, by name: the denoiser, and text encoders that have something to train."""
        names = [self.family.denoiser, *(self.family.clip_encoders if self.recipe.model.trains_text else ())]
        return {name: modules(self.pipe)[name] for name in names}

    def frozen(self) -> Mapping[str, nn.Module]:
        """The other parts, which are moved to the device only when they are needed."""
        registered = self.trained()
        return {name: part for name, part in modules(self.pipe).items() if name not in registered}

    def save(self, directory: Path) -> None:
        """Write what was trained as diffusers loads it: adapters and new words, or the whole pipeline; and what it
        belongs to."""
        directory.mkdir(parents=True, exist_ok=True)
        if self.whole:
            self.pipe.save_pretrained(directory)
            return
        if self.adapted:
            adapters.save(self.with_adapters(), self.adapted, directory)
        if self.recipe.model.new_tokens:
            tokens.save(self.pipe, self.family, self.recipe.model.new_tokens, directory)
        place = Path(self.known.folder) / self.family.denoiser
        base = {"path": self.recipe.model.path, self.family.denoiser: model_hash(str(place))}
        (directory / BASE).write_text(json.dumps(base, indent=2) + "\n", encoding="utf-8")
