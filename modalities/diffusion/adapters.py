"""Adapters on the parts of a pipeline: put in, saved as diffusers loads them, and read again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...common.errors import ModelError
from .sections import ImageLora

FILE = "pytorch_lora_weights.safetensors"
"""What `pipe.load_lora_weights(directory)` looks for."""
NAME = "default"


def config_of(section: ImageLora) -> Any:
    """PEFT's config of an adapter."""
    from peft import LoHaConfig, LoKrConfig, LoraConfig

    target = section.target_modules
    targets = target if isinstance(target, str) else list(target)
    if section.type == "lora":
        return LoraConfig(
            r=section.rank,
            lora_alpha=section.alpha,  # type: ignore[arg-type]  # PEFT takes any number
            lora_dropout=section.dropout,
            target_modules=targets,
            use_dora=section.dora,
            use_rslora=section.rslora,
            init_lora_weights=True if section.init == "default" else section.init,
        )
    form: Any = LoKrConfig if section.type == "lokr" else LoHaConfig
    return form(r=section.rank, alpha=section.alpha, rank_dropout=section.dropout, target_modules=targets)


def put_in(part: nn.Module, section: ImageLora, where: str) -> None:
    """Put an adapter into a part; its own weights stay frozen.

    Raises:
        ModelError: the part has no such modules.
    """
    from peft import inject_adapter_in_model

    try:
        inject_adapter_in_model(config_of(section), part, adapter_name=NAME)
    except ValueError as error:
        raise ModelError(str(error), where=f"{where}.target_modules", given=section.target_modules) from error
    if hasattr(part, "_hf_peft_config_loaded"):
        part._hf_peft_config_loaded = True  # type: ignore[assignment]  # so that the part's own adapter methods work
    for name, parameter in part.named_parameters():
        parameter.requires_grad_(is_adapter(name))


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return any(piece.startswith(("lora_", "lokr_", "hada_")) for piece in name.split("."))


def lower_base(part: nn.Module, dtype: torch.dtype) -> None:
    """Keep the frozen weights of linear and convolution layers in a lower precision: what autocast makes of them at
    every step anyway, so that nothing of the result changes."""
    for module in part.modules():
        if isinstance(module, nn.Linear | nn.Conv2d) and not any(p.requires_grad for p in module.parameters()):
            module.to(dtype)


def state(part: nn.Module) -> dict[str, Tensor]:
    """The adapter's tensors by PEFT's names, on the CPU."""
    from peft import get_peft_model_state_dict

    found = get_peft_model_state_dict(part, adapter_name=NAME, save_embedding_layers=False)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}


def merge(part: nn.Module) -> None:
    """Put an adapter of any kind into the part's own weights, in place; nothing of PEFT is left in it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in list(part.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge(safe_merge=True)
            above, _, last = name.rpartition(".")
            setattr(part.get_submodule(above), last, module.get_base_layer())
    del part.peft_config
    if hasattr(part, "_hf_peft_config_loaded"):
        part._hf_peft_config_loaded = False  # type: ignore[assignment]


def is_plain(section: ImageLora) -> bool:
    """Whether diffusers' own loader takes it: LoRA, without what its pipelines leave out (DoRA's magnitudes)."""
    return section.type == "lora" and not section.dora


def save(parts: Mapping[str, nn.Module], sections: Mapping[str, ImageLora], directory: Path) -> None:
    """Write adapters: plain ones in one file that `pipe.load_lora_weights(directory)` loads, with alpha and rank in its
    metadata; the others each as a PEFT directory, for `PeftModel.from_pretrained(pipe.<part>, directory/<part>)`.

    Args:
        parts: the parts with adapters, by name.
        sections: the recipe's section of each.
        directory: where to.
    """
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    metadata: dict[str, Any] = {}
    for name, part in parts.items():
        settings: Any = part.peft_config[NAME]  # type: ignore[index]
        if not is_plain(sections[name]):
            (directory / name).mkdir(exist_ok=True)
            settings.save_pretrained(str(directory / name))
            prefix = "base_model.model."
            whole = {f"{prefix}{key}": tensor for key, tensor in state(part).items()}
            save_file(whole, directory / name / "adapter_model.safetensors", metadata={"format": "pt"})
            continue
        tensors |= {f"{name}.{key}": tensor for key, tensor in state(part).items()}
        # Dropout is of the training only; diffusers leaves the layers that it makes for it in train mode.
        values = {**settings.to_dict(), "lora_dropout": 0.0}
        metadata |= {f"{name}.{key}": _json(value) for key, value in values.items()}
    if tensors:
        text = json.dumps(metadata, indent=2, sort_keys=True)
        save_file(tensors, directory / FILE, metadata={"format": "pt", "lora_adapter_metadata": text})


def _json(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else value


def read(directory: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, metadata) of a plain adapter's file, both by `part.name`.

    Raises:
        ModelError: there is none.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(directory / FILE), framework="pt") as file:
            metadata = json.loads((file.metadata() or {}).get("lora_adapter_metadata", "{}"))
            return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelError(f"no adapter can be read: {error}", where=directory / FILE) from error


def restore(parts: Mapping[str, nn.Module], sections: Mapping[str, ImageLora], directory: Path) -> None:
    """Put saved values into adapters that are in the parts already.

    Raises:
        ModelError: the saved adapter is another one.
    """
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    plain = any(is_plain(sections[name]) for name in parts)
    tensors = read(directory)[0] if plain else {}
    for name, part in parts.items():
        if is_plain(sections[name]):
            own = {k.removeprefix(f"{name}."): v for k, v in tensors.items() if k.startswith(f"{name}.")}
        else:
            loaded = load_file(directory / name / "adapter_model.safetensors")
            own = {key.removeprefix("base_model.model."): value for key, value in loaded.items()}
        expected = state(part)
        if own.keys() != expected.keys() or any(own[key].shape != expected[key].shape for key in own):
            wrong = sorted(own.keys() ^ expected.keys())[:3]
            raise ModelError("the saved adapter is not the recipe's", where=directory, given=wrong or "other shapes")
        set_peft_model_state_dict(part, own, adapter_name=NAME)


@contextmanager
def switched_off(parts: Mapping[str, nn.Module]) -> Iterator[None]:
    """A context in which the parts are what they were before they got adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for part in parts.values() for module in part.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
