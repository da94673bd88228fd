"""A saved adapter in the form of kohya's scripts, which ComfyUI and others read.

python -m luthier.modalities.diffusion.kohya RUN/checkpoints/best/model FILE.safetensors
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...common.errors import ExportError, LuthierError
from .adapters import FILE, read

PREFIXES = {"unet": "lora_unet", "text_encoder": "lora_te", "text_encoder_2": "lora_te2"}
ENDS = {"lora_A.weight": "lora_down.weight", "lora_B.weight": "lora_up.weight"}


def convert(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors by kohya's names, each pair with its own alpha.

    There the scale of an update is alpha / rank. Of a rank-stabilised adapter, where it is alpha / sqrt(rank), the
    alpha is multiplied by sqrt(rank).

    Args:
        tensors: by `part.layer.lora_A.weight`, as diffusers has them.
        metadata: PEFT's settings of each part, by `part.name`.

    Raises:
        ExportError: a part or a tensor that this form does not know, or settings that are not known.
    """
    two = any(name.startswith("text_encoder_2.") for name in tensors)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        layer, end = next(((rest.removesuffix(f".{end}"), end) for end in ENDS if rest.endswith(end)), ("", ""))
        if part not in PREFIXES or not end:
            raise ExportError("kohya's form does not know this", where=name, expected=", ".join(PREFIXES))
        if f"{part}.lora_alpha" not in metadata:
            raise ExportError("the adapter does not say its alpha", where=f"{part}.lora_alpha")
        base = _prefix(part, two) + "_" + layer.replace(".", "_")
        found[f"{base}.{ENDS[end]}"] = tensor.contiguous()
        if end == "lora_A.weight":
            found[f"{base}.alpha"] = torch.tensor(_alpha(part, layer, len(tensor), metadata))
    return found


def _prefix(part: str, two: bool) -> str:
    """CLIP's layers lie under `text_model` there, whatever transformers calls them today."""
    if part == "unet":
        return PREFIXES[part]
    return ("lora_te1" if two and part == "text_encoder" else PREFIXES[part]) + "_text_model"


def _alpha(part: str, layer: str, rank: int, metadata: Mapping[str, Any]) -> float:
    alpha = float((metadata.get(f"{part}.alpha_pattern") or {}).get(layer, metadata[f"{part}.lora_alpha"]))
    return alpha * math.sqrt(rank) if metadata.get(f"{part}.use_rslora") else alpha


def export(directory: Path, file: Path) -> None:
    """Convert the adapter that a checkpoint's `model/` holds.

    Raises:
        ExportError: it is of a kind that this form does not know: of a transformer (SD3, Flux; their programs read
            diffusers' form), DoRA, LoKr, LoHa.
    """
    from safetensors.torch import save_file

    if not (directory / FILE).is_file():
        raise ExportError("no plain adapter", where=directory, expected=FILE)
    tensors, metadata = read(directory)
    shortened = {name.replace(".text_model.", ".", 1): tensor for name, tensor in tensors.items()}
    converted = convert(shortened, metadata)
    parts = sorted({name.partition(".")[0] for name in tensors})
    about = {
        "ss_network_module": "networks.lora",
        "ss_network_dim": str(metadata[f"{parts[0]}.r"]),
        "ss_network_alpha": str(_alpha(parts[0], "", metadata[f"{parts[0]}.r"], metadata)),
        "ss_output_name": file.stem,
    }
    save_file(converted, file, metadata={"format": "pt", **about, "luthier_settings": json.dumps(metadata)})


if __name__ == "__main__":
    try:
        export(Path(sys.argv[1]), Path(sys.argv[2]))
    except (LuthierError, IndexError) as error:
        print(f"error: {error}" if isinstance(error, LuthierError) else __doc__, file=sys.stderr)
        sys.exit(2)
