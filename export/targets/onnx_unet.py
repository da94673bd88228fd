"""The UNet of a text-to-image pipeline as an ONNX graph; the other parts lie beside it as diffusers loads them.

Its names are those that diffusers and Optimum gave: `sample`, `timestep`, `encoder_hidden_states` in, of SDXL also
`text_embeds` and `time_ids`; `out_sample` out.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...common.errors import ExportError
from ..graph import Session
from ..graph import write as write_graph
from ..source import Source
from .merged import WEIGHTS

needs_whole = True
PART, FILE, OUTPUT = "unet", "model.onnx", "out_sample"
PIECES = 6
"""Numbers of SDXL's sizes: of the picture, the crop, the target."""
BATCH, TOKENS = 2, 5
"""Sizes of the example: each another, so that none is taken for another."""


class Denoiser(nn.Module):
    """A UNet of diffusers as one function of tensors."""

    def __init__(self, unet: Any):
        super().__init__()
        self.unet = unet

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        text_embeds: Tensor | None = None,
        time_ids: Tensor | None = None,
    ) -> Tensor:
        """What it says [B, C, h, w] of noised latents [B, C, h, w] at steps [B], for texts [B, T, D]."""
        added = None if text_embeds is None else {"text_embeds": text_embeds, "time_ids": time_ids}
        given = (sample, timestep, encoder_hidden_states)
        found: Tensor = self.unet(*given, added_cond_kwargs=added, return_dict=False)[0]
        return found


def write(source: Source, directory: Path, dtype: str) -> None:
    """Write the graph into the UNet's folder, with the rest of the pipeline.

    Raises:
        ExportError: the model's denoiser is no UNet.
    """
    pipe = source.exportable.load(source.merged).pipe
    if PART not in pipe.components:
        raise ExportError(
            "only a UNet is written as a graph", where="--to", given=type(pipe).__name__,
            expected="Stable Diffusion 1 or 2, SDXL", do="--to merged",
        )  # fmt: skip
    unused = shutil.ignore_patterns(*WEIGHTS)

    def left(folder: str, names: list[str]) -> Iterable[str]:
        return unused(folder, names) if Path(folder).name == PART else ()

    shutil.copytree(source.merged, directory, dirs_exist_ok=True, ignore=left)
    write_unet(pipe.unet, directory / PART / FILE)


def write_unet(unet: Any, file: Path) -> None:
    """Write the graph of a UNet, for latents whose sides it can halve as often as it does."""
    config = unet.config
    side = 2 ** (len(config.block_out_channels) - 1)
    inputs = {
        "sample": torch.zeros(BATCH, config.in_channels, 2 * side, 3 * side),
        "timestep": torch.ones(BATCH),
        "encoder_hidden_states": torch.zeros(BATCH, TOKENS, config.cross_attention_dim),
    }
    if config.addition_embed_type == "text_time":
        width = config.projection_class_embeddings_input_dim - PIECES * config.addition_time_embed_dim
        inputs |= {"text_embeds": torch.zeros(BATCH, width), "time_ids": torch.zeros(BATCH, PIECES)}
    axes: dict[str, dict[int, str]] = {name: {0: "batch"} for name in inputs}
    axes["sample"] |= {2: "height", 3: "width"}
    axes["encoder_hidden_states"] |= {1: "tokens"}
    write_graph(Denoiser(unet), inputs, [OUTPUT], axes, file)


class Served:
    """The graph in onnxruntime, called as diffusers calls a UNet."""

    def __init__(self, file: Path):
        self.session = Session(file)

    def __call__(
        self,
        sample: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        added_cond_kwargs: Mapping[str, Tensor] | None = None,
        return_dict: bool = True,
        **_: Any,
    ) -> Any:
        """What the graph says [B, C, h, w] of noised latents [B, C, h, w] at one step or steps [B]."""
        from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput

        given = {"sample": sample, "timestep": timestep.expand(len(sample)), **(added_cond_kwargs or {})}
        given["encoder_hidden_states"] = encoder_hidden_states
        found = self.session({name: value.float().cpu().numpy() for name, value in given.items()})[OUTPUT]
        said = torch.from_numpy(found).to(sample.dtype)
        return UNet2DConditionOutput(sample=said) if return_dict else (said,)


def runner(source: Source, directory: Path, dtype: str) -> Any:
    """The pipeline with the graph in the place of the UNet's own function."""
    drawing = source.exportable.load(source.merged)
    drawing.pipe.unet.forward = Served(directory / PART / FILE)
    return drawing
