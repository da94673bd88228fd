"""The families of models: how each one's text is encoded, and how its denoiser is called.

The text goes through diffusers' own pipeline, so that training sees what sampling sees. B batch, T tokens, D width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

Conditions = dict[str, Tensor]
"""`embeds` [B, T, D], `pooled` [B, D] and `sizes` [B, 6], as far as the family has them."""

PIECE = 75
"""Tokens of a caption in one reading of CLIP, besides begin and end."""


class Family(ABC):
    """One family of models."""

    denoiser: ClassVar[str]
    """Name of the pipeline's part that is trained."""
    flow: ClassVar[bool] = False
    """Whether it is a flow-matching model."""
    clip_encoders: ClassVar[tuple[str, ...]] = ("text_encoder",)
    """Names of its CLIP text encoders."""
    tokenizer: ClassVar[str] = "tokenizer"
    """Name of the tokenizer whose limit bounds a caption."""
    patch: ClassVar[int] = 1
    """Latent pixels along one side of a token of the denoiser, besides the VAE's factor."""
    longest: ClassVar[int | None] = None
    """Most tokens of a caption, with begin and end; None: the tokenizer's own."""
    joins: ClassVar[bool] = False
    """Whether a long caption can be read in pieces."""

    @abstractmethod
    def encode(self, pipe: Any, texts: Sequence[str], pieces: int = 1) -> Conditions:
        """Text embeddings by the pipeline's own encoders; with gradient where these have one."""

    @abstractmethod
    def predict(
        self, denoiser: Any, noisy: Tensor, times: Tensor, conditions: Conditions, guidance: float = 1.0
    ) -> Tensor:
        """What the denoiser says [B, C, H, W] for noised latents [B, C, H, W] at times [B], 0 to 1000."""

    def unpacked(self, pipe: Any, latents: Tensor, height: int, width: int) -> Tensor:
        """Latents [B, C, H, W] of what a pipeline gives with `output_type="latent"`."""
        return latents

    def embedded(self, conditions: Conditions) -> dict[str, Tensor]:
        """The arguments by which a pipeline takes text embeddings."""
        names = {"embeds": "prompt_embeds", "pooled": "pooled_prompt_embeds"}
        return {name: conditions[key] for key, name in names.items() if key in conditions}


class StableDiffusion(Family):
    """Stable Diffusion 1 and 2."""

    denoiser = "unet"
    joins = True

    def encode(self, pipe: Any, texts: Sequence[str], pieces: int = 1) -> Conditions:
        if pieces == 1:
            return {"embeds": pipe.encode_prompt(list(texts), pipe.text_encoder.device, 1, False)[0]}
        parts = [pipe.text_encoder(ids)[0] for ids in _pieces(pipe, "tokenizer", "text_encoder", texts, pieces)]
        return {"embeds": torch.cat(parts, dim=1)}

    def predict(
        self, denoiser: Any, noisy: Tensor, times: Tensor, conditions: Conditions, guidance: float = 1.0
    ) -> Tensor:
        said: Tensor = denoiser(noisy, times, encoder_hidden_states=conditions["embeds"]).sample
        return said


class StableDiffusionXL(Family):
    """SDXL: two text encoders, and the picture's size and crop as conditions."""

    denoiser = "unet"
    clip_encoders = ("text_encoder", "text_encoder_2")
    joins = True

    def encode(self, pipe: Any, texts: Sequence[str], pieces: int = 1) -> Conditions:
        if pieces == 1:
            device = pipe.text_encoder_2.device
            embeds, _, pooled, _ = pipe.encode_prompt(list(texts), device=device, do_classifier_free_guidance=False)
            return {"embeds": embeds, "pooled": pooled}
        widths, first = [], None
        for number in ("", "_2"):
            names = (f"tokenizer{number}", f"text_encoder{number}")
            encoder = getattr(pipe, names[1])
            said = [encoder(ids, output_hidden_states=True) for ids in _pieces(pipe, *names, texts, pieces)]
            widths.append(torch.cat([part.hidden_states[-2] for part in said], dim=1))
            first = said[0][0]  # the projected text of the first piece, of the last encoder
        assert first is not None
        return {"embeds": torch.cat(widths, dim=-1), "pooled": first}

    def predict(
        self, denoiser: Any, noisy: Tensor, times: Tensor, conditions: Conditions, guidance: float = 1.0
    ) -> Tensor:
        added = {"text_embeds": conditions["pooled"], "time_ids": conditions["sizes"].to(noisy.dtype)}
        said: Tensor = denoiser(
            noisy, times, encoder_hidden_states=conditions["embeds"], added_cond_kwargs=added
        ).sample
        return said


class StableDiffusion3(Family):
    """Stable Diffusion 3 and 3.5: two CLIP encoders and, where it is there, T5."""

    denoiser = "transformer"
    flow = True
    clip_encoders = ("text_encoder", "text_encoder_2")
    tokenizer = "tokenizer_3"
    patch = 2
    longest = 256

    def encode(self, pipe: Any, texts: Sequence[str], pieces: int = 1) -> Conditions:
        device = pipe.text_encoder.device
        embeds, _, pooled, _ = pipe.encode_prompt(
            list(texts), None, None, device=device, do_classifier_free_guidance=False
        )
        return {"embeds": embeds, "pooled": pooled}

    def predict(
        self, denoiser: Any, noisy: Tensor, times: Tensor, conditions: Conditions, guidance: float = 1.0
    ) -> Tensor:
        said: Tensor = denoiser(
            hidden_states=noisy,
            encoder_hidden_states=conditions["embeds"],
            pooled_projections=conditions["pooled"],
            timestep=times,
        ).sample
        return said


class Flux(Family):
    """Flux: CLIP's pooled text and T5's tokens; latents in packs of 2 x 2."""

    denoiser = "transformer"
    flow = True
    tokenizer = "tokenizer_2"
    patch = 2
    longest = 512

    def encode(self, pipe: Any, texts: Sequence[str], pieces: int = 1) -> Conditions:
        embeds, pooled, _ = pipe.encode_prompt(list(texts), device=pipe.text_encoder.device)
        return {"embeds": embeds, "pooled": pooled}

    def predict(
        self, denoiser: Any, noisy: Tensor, times: Tensor, conditions: Conditions, guidance: float = 1.0
    ) -> Tensor:
        batch, channels, height, width = noisy.shape
        packed = noisy.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
        told = torch.full((batch,), guidance, device=noisy.device) if denoiser.config.guidance_embeds else None
        said = denoiser(
            hidden_states=packed.reshape(batch, height * width // 4, channels * 4),
            encoder_hidden_states=conditions["embeds"],
            pooled_projections=conditions["pooled"],
            timestep=times / 1000,
            img_ids=image_ids(height // 2, width // 2, noisy),
            txt_ids=noisy.new_zeros(conditions["embeds"].shape[1], 3),
            guidance=told,
        ).sample
        return self._grid(said, height // 2, width // 2)

    def _grid(self, packed: Tensor, rows: int, columns: int) -> Tensor:
        """[B, rows x columns, 4 C] as [B, C, 2 rows, 2 columns]."""
        batch, _, width = packed.shape
        grid = packed.view(batch, rows, columns, width // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
        return grid.reshape(batch, width // 4, rows * 2, columns * 2)

    def unpacked(self, pipe: Any, latents: Tensor, height: int, width: int) -> Tensor:
        side = pipe.vae_scale_factor * 2
        return self._grid(latents, height // side, width // side)


def image_ids(rows: int, columns: int, like: Tensor) -> Tensor:
    """Place of each pack of latents [rows x columns, 3]: 0, row, column."""
    ids = like.new_zeros(rows, columns, 3)
    ids[..., 1] += torch.arange(rows, device=like.device, dtype=like.dtype)[:, None]
    ids[..., 2] += torch.arange(columns, device=like.device, dtype=like.dtype)
    return ids.reshape(-1, 3)


def _pieces(pipe: Any, tokenizer: str, encoder: str, texts: Sequence[str], number: int) -> list[Tensor]:
    """Token ids [B, 77] of each piece of the texts; a text that is shorter ends in empty pieces."""
    words, device = getattr(pipe, tokenizer), getattr(pipe, encoder).device
    texts = [pipe.maybe_convert_prompt(text, words) for text in texts]
    rows = [words(text, add_special_tokens=False).input_ids[: number * PIECE] for text in texts]
    found = []
    for at in range(0, number * PIECE, PIECE):
        piece = torch.full((len(rows), PIECE + 2), words.pad_token_id)
        for line, row in zip(piece, rows, strict=True):
            part = [words.bos_token_id, *row[at : at + PIECE], words.eos_token_id]
            line[: len(part)] = torch.tensor(part)
        found.append(piece.to(device))
    return found


FAMILIES: Mapping[str, Family] = {
    "StableDiffusionPipeline": StableDiffusion(),
    "StableDiffusionXLPipeline": StableDiffusionXL(),
    "StableDiffusion3Pipeline": StableDiffusion3(),
    "FluxPipeline": Flux(),
}
"""By the name of the pipeline's class, as `model_index.json` has it."""
