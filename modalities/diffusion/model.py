"""A pipeline of diffusers: what its directory says, loading it, and its latents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...common.errors import ModelError, unreadable_model
from ...common.record import model_hash
from .families import FAMILIES, Family

EXPECTED = f"a pipeline directory of diffusers: {', '.join(FAMILIES)}"


@dataclass(frozen=True)
class Facts:
    """What a pipeline's directory says, without its weights.

    Args:
        folder: where it lies on this machine.
        family: of the model.
        factor: pixels along one side of a latent pixel.
        channels: of the latents.
        scale: of the latents, as the VAE's config has it.
    """

    folder: str
    family: Family
    factor: int
    channels: int
    scale: float | None

    @property
    def step(self) -> int:
        """Sides of pictures are multiples of this, in pixels."""
        return self.factor * self.family.patch

    @cached_property
    def vae_hash(self) -> str:
        """All of the VAE that decides latents."""
        return f"{self.scale} {_weights_hash(Path(self.folder) / 'vae')}"

    @cached_property
    def text_hash(self) -> str:
        """All of the text encoders that decides embeddings."""
        parts = sorted(part for part in Path(self.folder).glob("text_encoder*") if part.is_dir())
        return repr([(part.name, _weights_hash(part)) for part in parts])


def _weights_hash(folder: Path) -> str | None:
    """SHA-256 of a part's weights; they are read once in a process as long as they don't change."""
    files = [(file.name, file.stat()) for file in sorted(folder.iterdir())]
    return _hash_of(str(folder), tuple((name, status.st_size, status.st_mtime_ns) for name, status in files))


@lru_cache(maxsize=64)
def _hash_of(folder: str, _marks: tuple[object, ...]) -> str | None:
    return model_hash(folder)


def local(path: str) -> str:
    """The directory of a pipeline: itself, or where the hub's cache has it."""
    if Path(path).is_dir():
        return path
    if Path(path).is_absolute() or path.count("/") != 1:
        raise unreadable_model(path, FileNotFoundError("no such directory"), "a text-to-image pipeline")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        wanted = ["*.json", "*.txt", "*.model", "*/*.safetensors", "*/*.json", "*/*.txt", "*/*.model"]
        return str(snapshot_download(path, allow_patterns=wanted))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise unreadable_model(path, error, "a text-to-image pipeline") from error


def facts(path: str) -> Facts:
    """What can be known of a pipeline without loading it.

    Raises:
        ModelError: it is no pipeline, or one of another family.
    """
    folder = Path(local(path))
    try:
        name = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))["_class_name"]
        vae = json.loads((folder / "vae" / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError) as error:
        raise ModelError("not a pipeline of diffusers", where="model.path", given=path, expected=EXPECTED) from error
    if name not in FAMILIES:
        raise ModelError("a pipeline of another family", where="model.path", given=name, expected=EXPECTED)
    return Facts(
        str(folder),
        FAMILIES[name],
        2 ** (len(vae["block_out_channels"]) - 1),
        vae.get("latent_channels", 4),
        vae.get("scaling_factor"),
    )


def tokenizer(known: Facts) -> tuple[Any, int]:
    """(tokenizer, most tokens with begin and end) by which captions are counted."""
    from transformers import AutoTokenizer

    for name in (known.family.tokenizer, "tokenizer"):
        if (Path(known.folder) / name).is_dir():
            try:
                words = AutoTokenizer.from_pretrained(str(Path(known.folder) / name))
            except (OSError, ValueError) as error:
                raise unreadable_model(known.folder, error, "a text-to-image pipeline") from error
            return words, (known.family.longest if name != "tokenizer" else None) or words.model_max_length
    raise ModelError("the pipeline has no tokenizer", where="model.path", given=known.folder)


def load(known: Facts, text_dtype: torch.dtype = torch.float32) -> Any:
    """The pipeline, every part on the CPU, frozen and in eval mode.

    The VAE is in float32 whatever the precision: in 16-bit floats the widespread ones overflow.

    Args:
        known: its facts.
        text_dtype: of the text encoders.

    Raises:
        ModelError: it can't be loaded, or it is for another task.
    """
    from diffusers import DiffusionPipeline
    from diffusers.utils import logging
    from transformers.utils.logging import disable_progress_bar

    logging.disable_progress_bar()
    disable_progress_bar()
    index = json.loads((Path(known.folder) / "model_index.json").read_text(encoding="utf-8"))
    dtypes = {name: text_dtype for name in index if name.startswith("text_encoder")}
    unused = ("safety_checker", "feature_extractor", "image_encoder")
    absent: dict[str, Any] = {
        name: None for name, value in index.items() if name in unused or (isinstance(value, list) and value[0] is None)
    }
    if "requires_safety_checker" in index:
        absent["requires_safety_checker"] = False
    try:
        pipe = DiffusionPipeline.from_pretrained(
            known.folder, dtype={**dtypes, "default": torch.float32}, local_files_only=True, **absent
        )
    except (OSError, ValueError) as error:
        raise unreadable_model(known.folder, error, "a text-to-image pipeline") from error
    for part in modules(pipe).values():
        part.requires_grad_(False).eval()
    denoiser = getattr(pipe, known.family.denoiser)
    if denoiser.config.in_channels not in (known.channels, known.channels * 4):
        raise ModelError(
            "the denoiser takes more than latents, as for inpainting",
            where="model.path",
            given=f"{denoiser.config.in_channels} channels",
            expected=f"{known.channels}",
        )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def modules(pipe: Any) -> dict[str, nn.Module]:
    """The parts of a pipeline that have weights, by name."""
    return {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """A context in which nothing is computed in 16 bits."""
    with torch.autocast(device.type, enabled=False):
        yield


# ---------------------------------------------------------------------------------------------- latents


def moments(vae: Any, pixels: Tensor) -> Tensor:
    """Mean and log-variance of the latents [B, 2 C, h, w] of pictures, uint8 [B, 3, H, W], in float32.

    Raises:
        ModelError: the VAE gives values that are no numbers.
    """
    with torch.no_grad(), full_precision(pixels.device):
        scaled = pixels.to(vae.dtype) / 127.5 - 1
        found: Tensor = vae.encode(scaled).latent_dist.parameters
    if (~torch.isfinite(found)).any():
        raise ModelError(
            "the VAE gives latents that are no numbers",
            where="model.path",
            given=str(vae.dtype),
            do="use a VAE that is whole",
        )
    return found


def latents(config: Any, parameters: Tensor, sample: bool) -> Tensor:
    """Latents [B, C, h, w] as the denoiser takes them: drawn or the mean, shifted and scaled as the VAE's config says.

    Args:
        config: of the VAE, as a mapping.
        parameters: mean and log-variance [B, 2 C, h, w].
        sample: draw, with torch's global generator.
    """
    mean, variance = parameters.chunk(2, dim=1)
    found = (
        mean
        + torch.exp(0.5 * variance.clamp(-30.0, 20.0)) * torch.randn(mean.shape, dtype=mean.dtype, device=mean.device)
        if sample
        else mean
    )
    if config.get("latents_mean") and config.get("latents_std"):
        means, stds = (found.new_tensor(config[name]).view(1, -1, 1, 1) for name in ("latents_mean", "latents_std"))
        return (found - means) * float(config["scaling_factor"]) / stds
    return (found - float(config.get("shift_factor") or 0.0)) * float(config["scaling_factor"])


def pictured(pipe: Any, found: Tensor) -> list[Any]:
    """Pillow images of latents [B, C, h, w], decoded in float32."""
    config = pipe.vae.config
    found = found.to(pipe.vae.dtype)
    if config.get("latents_mean") and config.get("latents_std"):
        means, stds = (found.new_tensor(config[name]).view(1, -1, 1, 1) for name in ("latents_mean", "latents_std"))
        found = found * stds / config["scaling_factor"] + means
    else:
        found = found / config["scaling_factor"] + (config.get("shift_factor") or 0.0)
    with torch.no_grad(), full_precision(found.device):
        pixels = pipe.vae.decode(found).sample
    return list(pipe.image_processor.postprocess(pixels, output_type="pil"))
