"""What the frozen parts of a pipeline give: latents and text embeddings, from the cache as far as it has them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..cache import TensorCache, rounded
from ..families import Conditions
from ..model import moments
from .config import Config
from .parts import Parts

TOGETHER = 2**18
"""Pixels that the VAE encodes at once where a cache keeps the results: one picture of 512 x 512, many small ones."""


class Frozen:
    """Runs VAE and text encoders where the data workers found nothing in the cache.

    The cache is asked once more before anything is encoded: a worker may have looked before the batch that brought it.
    So the first batch in which something occurs decides its value, whatever the workers do, and a run that resumes goes
    on with the same values. They are rounded as the cache rounds them, whether they come from it or are new.

    Args:
        recipe: how captions are read, and whether text encoders are trained.
        parts: the pipeline.
        cache: None: everything is encoded each time.
    """

    def __init__(self, recipe: Config, parts: Parts, cache: TensorCache | None):
        self.recipe, self.parts, self.cache = recipe, parts, cache

    def place(self, device: torch.device, names: Collection[str] | None = None) -> None:
        """Move frozen parts (default: all) to the device; they are not there before they are needed."""
        for name, part in self.parts.frozen().items():
            if names is None or name in names:
                part.to(device)

    # ------------------------------------------------------------------ pictures

    def moments(self, data: dict[str, Any]) -> Tensor:
        """Mean and log-variance of the latents [B, 2 C, h, w] of a batch, by what the processing has collated."""
        pixels: Tensor | None = data["pixels"]
        if pixels is None:
            found: Tensor = data["moments"]
            return found
        self.place(pixels.device, ["vae"])
        if self.cache is None:
            return moments(self.parts.pipe.vae, pixels)
        rows = {} if data["moments"] is None else dict(zip(data["cached"], data["moments"], strict=True))
        missing = [at for at in range(len(data["texts"])) if at not in rows]
        new = []
        for at, picture in zip(missing, pixels, strict=True):
            kept = self.cache.get(data["image_keys"][at])
            if kept is None:
                new.append((at, picture))
            else:
                rows[at] = kept["moments"].to(pixels.device)
        number = max(1, TOGETHER // pixels[0, 0].numel())
        for begin in range(0, len(new), number):
            part = new[begin : begin + number]
            values = rounded(moments(self.parts.pipe.vae, torch.stack([picture for _, picture in part])))
            for (at, _), value in zip(part, values, strict=True):
                rows[at] = value
                self.cache.put(data["image_keys"][at], {"moments": value})
        return torch.stack([rows[at] for at in range(len(rows))])

    # ------------------------------------------------------------------ captions

    def conditions(self, data: dict[str, Any], device: torch.device) -> Conditions:
        """Text embeddings of a batch's captions, and SDXL's sizes."""
        texts, trained = data["texts"], self.recipe.model.trains_text
        if len(data["told"]) == len(texts):
            return {**data["text"], "sizes": data["sizes"]}
        self.place(device, [name for name in self.parts.frozen() if name.startswith("text_encoder")])
        with nullcontext() if trained else torch.no_grad():
            if self.cache is None or trained:
                return {**self._encode(texts), "sizes": data["sizes"]}
            return {**self._kept(self.cache, data, device), "sizes": data["sizes"]}

    def _encode(self, texts: Sequence[str]) -> Conditions:
        found = self.parts.family.encode(self.parts.pipe, texts, self.recipe.data.captions.chunks)
        return {name: value.float() for name, value in found.items()}

    def _kept(self, cache: TensorCache, data: dict[str, Any], device: torch.device) -> Conditions:
        keys: list[str] = data["text_keys"]
        known: dict[str, Conditions] = {}
        for row, at in enumerate(data["told"]):
            known[keys[at]] = {name: value[row] for name, value in data["text"].items()}
        new: dict[str, str] = {}
        for name, text in zip(keys, data["texts"], strict=True):
            kept = None if name in known or name in new else cache.get(name)
            if kept is not None:
                known[name] = {part: value.to(device) for part, value in kept.items()}
            elif name not in known:
                new[name] = text
        if new:
            made = {part: rounded(value) for part, value in self._encode(list(new.values())).items()}
            for row, name in enumerate(new):
                known[name] = {part: value[row] for part, value in made.items()}
                cache.put(name, known[name])
        return {part: torch.stack([known[name][part] for name in keys]) for part in known[keys[0]]}
