"""Paraformer's network: FunASR's classes with the weights of a directory, adapted, frozen and sped up as asked."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ....common.adapters import adapted
from ....common.errors import ModelError, RecipeError
from . import hotwords, sensevoice
from .config import Config
from .directory import WEIGHTS, Directory, quiet, registered
from .faster import hasten
from .processing import ParaformerProcessing

log = logging.getLogger(__name__)

MODELS = ("Paraformer", hotwords.NAME, sensevoice.NAME)
"""FunASR's names of the models that are trained here."""
_OTHERS = {
    "SeacoParaformer": "its loss takes hotwords and where they are said, and its inference audio, not features",
    "ParaformerStreaming": "its inference takes audio in pieces, with what it remembers between them, not features",
    "BiCifParaformer": "its inference takes audio, not features",
}
"""Why others, which are close to these, are not."""

_VOCABULARY = ("decoder.embed", "decoder.output_layer", "ctc.ctc_lo", "bias_embed")
"""Layers with a row for each token."""


def load_model(recipe: Config, weights: Path | None, processing: ParaformerProcessing) -> tuple[nn.Module, Any]:
    """(what is trained, FunASR's model inside): the model itself, or a PEFT model around it.

    Args:
        recipe: adapter, frozen parts, precision.
        weights: directory of a saved adapter, if that is what was saved.
        processing: the data path, which knows the model's directory and its token list.
    """
    section, directory = recipe.model, processing.directory
    if recipe.task.predictor_weight is not None:
        directory.model["predictor_weight"] = recipe.task.predictor_weight
    inner = build(directory, len(processing.tokens), processing.tokens.listed, processing.frontend.size)
    extended = False
    if directory.weights is None:
        log.warning("%s holds no %s: the model starts from random weights", directory.path, WEIGHTS)
    else:
        extended = load_weights(inner, directory.weights)
    for name in section.freeze:
        part = getattr(inner, name, None)
        if not isinstance(part, nn.Module):
            parts = ", ".join(name for name, _ in inner.named_children() if _has(inner, name))
            raise ModelError("the model has no such part", where="model.freeze", given=name, expected=parts)
    _check_predictor(recipe, inner)
    hasten(inner)
    if isinstance(getattr(inner, "predictor", None), nn.Module):
        inner.predictor.forward = partial(_in_float32, inner.predictor.forward)
    model: nn.Module = inner
    if section.lora is not None:
        lora = section.lora
        if extended:  # new rows can't be learned by an adapter of other layers
            names = [name for name in _VOCABULARY if _has(inner, name)]
            lora = lora.model_copy(update={"modules_to_save": tuple(dict.fromkeys([*lora.modules_to_save, *names]))})
        frozen = "|".join(rf"{name}\..*" for name in section.freeze) or None
        model = adapted(inner, lora, weights, exclude_modules=frozen)
    for name in section.freeze:
        getattr(inner, name).requires_grad_(False)
    if getattr(inner, "sampling_ratio", None) == 0 and _has(inner, "decoder.embed"):
        inner.decoder.embed.requires_grad_(False)  # only the sampler uses it
    if recipe.train.gradient_checkpointing:
        for layer in layers(inner):
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return model, inner


def build(directory: Directory, size: int, tokens: list[str] | None, features: int) -> Any:
    """FunASR's model of a configuration, with random weights; as `AutoModel.build_model` makes it, and nothing else.

    Args:
        directory: the configuration.
        size: tokens of the vocabulary.
        tokens: their list.
        features: values of an input frame.
    """
    kind = registered("model", directory.config["model"])
    if directory.config["model"] not in MODELS:
        reason = _OTHERS.get(directory.config["model"], "it is called in another way")
        raise ModelError(
            f"this model of FunASR is not trained here: {reason}", where=directory.path / "config.yaml",
            given=directory.config["model"], expected=" or ".join(MODELS),
        )  # fmt: skip
    settings = {**directory.model, **directory.config, "vocab_size": size, "token_list": tokens, "input_size": features}
    for table in ("encoder", "decoder", "predictor", "specaug", "normalize"):
        name = settings.get(table)
        if isinstance(name, str):
            registered(table, name)
    try:
        with quiet():
            return kind(**settings)
    except (TypeError, ValueError, KeyError) as error:
        raise ModelError("FunASR can't make this model", where=directory.path / "config.yaml", given=error) from error


def load_weights(model: nn.Module, file: Path) -> bool:
    """Load parameters, all of them: a name that is missing or of another shape is an error, not a note.

    Where the file has fewer tokens than the model, their rows are kept and the new ones are the mean of the old.

    Returns:
        whether there are new rows.
    """
    try:
        state: Any = torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError) as error:
        raise ModelError("the weights can't be read", where=file, given=str(error).splitlines()[0]) from error
    for name in ("state_dict", "model_state_dict", "model"):  # as FunASR's trainer wraps them
        state = state[name] if isinstance(state.get(name), dict) else state
    state = {name.removeprefix("module."): value for name, value in state.items() if isinstance(value, Tensor)}
    own, extended = model.state_dict(), False
    for name, value in own.items():
        given = state.get(name)
        if given is None or given.shape == value.shape:
            continue
        grows = name.rpartition(".")[0].startswith(_VOCABULARY) and given.shape[1:] == value.shape[1:]
        if not grows or len(given) > len(value):
            raise ModelError(
                "a weight has another shape than the configuration says", where=f"{file}: {name}",
                given=tuple(given.shape), expected=tuple(value.shape),
            )  # fmt: skip
        new = given.mean(0, keepdim=True).expand(len(value) - len(given), *given.shape[1:])
        state[name], extended = torch.cat([given, new]), True
    missing = sorted(own.keys() - state.keys())
    if missing:
        raise ModelError("weights are missing", where=file, given=", ".join(missing[:8]), expected=f"{len(own)} names")
    unused = sorted(state.keys() - own.keys())
    if unused:
        log.warning("%s: %d weights are not part of the model: %s", file, len(unused), ", ".join(unused[:8]))
    model.load_state_dict({name: state[name] for name in own})
    return extended


def layers(model: Any) -> list[Any]:
    """Encoder and decoder layers."""
    return [
        module
        for module in model.modules()
        if any(mark in type(module).__name__ for mark in ("EncoderLayer", "DecoderLayer"))
    ]


def _check_predictor(recipe: Config, model: Any) -> None:
    """Refuse a model that would never learn the number of its tokens, unless that is asked for."""
    trained = recipe.task.predictor_weight is None and "predictor" not in recipe.model.freeze
    if trained and getattr(model, "predictor_weight", None) == 0:
        raise RecipeError(
            "the model's predictor_weight is 0 (FunASR's default): it would never learn how many tokens to write",
            where="task.predictor_weight", expected="1, as a rule", do="give task.predictor_weight",
        )  # fmt: skip


def _in_float32(forward: Callable[..., Any], hidden: Tensor, *more: Any, **named: Any) -> Any:
    """Weights are summed up over all frames, which is no work for bfloat16; FunASR says so for CUDA only."""
    with torch.autocast(hidden.device.type, enabled=False):
        return forward(hidden.float(), *more, **named)


def _has(model: nn.Module, name: str) -> bool:
    try:
        return any(True for _ in model.get_submodule(name).parameters())
    except AttributeError:
        return False
