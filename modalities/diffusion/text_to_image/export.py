"""Text-to-image models for export: pictures of captions by fixed seeds, and the losses that follow from the parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from ....common.data.processing import Batch
from ....common.errors import ExportError
from ....common.exportable import Exportable, Output
from ....common.task import Predicted
from .. import adapters, kohya, tokens
from ..model import facts, load, modules

STEPS, GUIDANCE = 4, 3.0
"""Of pictures that are compared, where the recipe says nothing of sampling."""


class Drawing:
    """A pipeline of diffusers as a runner."""

    def __init__(self, pipe: Any, steps: int, guidance: float):
        self.pipe, self.steps, self.guidance = pipe, steps, guidance
        for part in modules(pipe).values():
            part.eval()

    @torch.no_grad()
    def draw(self, prompt: str, seed: int, width: int, height: int) -> np.ndarray:
        """A picture [height, width, 3] with numbers in [0, 1]."""
        scheduler = self.pipe.scheduler
        self.pipe.scheduler = type(scheduler).from_config(scheduler.config)
        try:
            found = self.pipe(
                prompt, width=width, height=height, num_inference_steps=self.steps, guidance_scale=self.guidance,
                generator=torch.Generator().manual_seed(seed), output_type="np",
            )  # fmt: skip
        finally:
            self.pipe.scheduler = scheduler
        return np.asarray(found.images[0])


class ImageExport(Exportable):
    """A pipeline of diffusers: trained whole, or an adapter, new words or both for its base."""

    form: ClassVar[str] = "text_to_image"
    library: ClassVar[str] = "diffusers"

    @property
    def adapts(self) -> bool:
        return not self.task.parts.whole

    def _drawing(self, pipe: Any) -> Drawing:
        section = self.task.recipe.evaluate.sampling
        return Drawing(pipe, section.steps if section else STEPS, section.guidance if section else GUIDANCE)

    def trained(self) -> Drawing:
        return self._drawing(self.task.pipe)

    def save(self, directory: Path) -> None:
        section = self.task.recipe.model
        if section.new_tokens or section.quantization != "none":
            raise ExportError(
                "new words, and what was trained on a quantised base, are not put into a pipeline",
                where="--to",
                do="--to diffusers",
            )
        for part in self.task.parts.with_adapters().values():
            adapters.merge(part)
        self.task.pipe.save_pretrained(directory)

    def load(self, directory: Path) -> Drawing:
        return self._drawing(load(facts(str(directory))))

    def load_adapter(self, directory: Path) -> Drawing:
        """The base with adapters and new words, by diffusers' own loaders; adapters other than LoRA by PEFT's."""
        from peft import PeftModel

        pipe = load(self.task.processing.known)
        tokens.load(pipe, self.task.family, self.task.recipe.model.new_tokens, directory)
        for name, section in self.task.parts.adapted.items():
            if not adapters.is_plain(section):
                PeftModel.from_pretrained(modules(pipe)[name], str(directory / name))  # puts it into the part itself
        for file in directory.glob("*.safetensors"):
            pipe.load_lora_weights(str(directory), weight_name=file.name)
        return self._drawing(pipe)

    def write_kohya(self, model: Path, file: Path) -> None:
        kohya.export(model, file)

    def outputs(self, runner: Drawing, data: dict[str, Any]) -> list[Output]:
        """A picture of each caption, from the seed of its picture, at the size of the training."""
        found = []
        for text, seed, crop in zip(data["texts"], data["seeds"], data["crops"], strict=True):
            width, height = crop.size
            found.append(Output(runner.draw(text, seed % 2**31, width, height)))
        return found

    def predict(self, runner: Drawing, batch: Batch) -> Predicted:
        """What the task makes of the runner's parts, which draw the pictures of this evaluation, too."""
        self.task.parts.pipe = self.task.pipe = runner.pipe
        return self.own_predict(batch)
