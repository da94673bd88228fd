"""NeMo's network: made from a `.nemo` file or a configuration, with another vocabulary or an adapter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ....common.adapters import adapted
from ....common.errors import ModelError
from .config import Config
from .files import Origin, connector, nemo_asr, resolved, unreadable
from .vocabulary import Characters, Tokens, change, piece_section

_ENCODER = ("encoder", "transf_encoder", "encoder_decoder_proj")
"""All that comes before the decoder."""
_TIED = ("log_softmax",)
"""The output layer that shares its weights with the table of tokens; an adapter on it would change both when merged."""


def load_model(
    recipe: Config, weights: Path | None, origin: Origin, own: Tokens | None, tokens: Tokens, pieces: str | None
) -> tuple[nn.Module, Any]:
    """(what is trained, NeMo's model inside): the model itself, or a PEFT model around it.

    Args:
        recipe: adapter, precision, frozen parts.
        weights: directory of a saved model or adapter.
        origin: what the model is made from.
        own: its vocabulary, where it has one.
        tokens: the vocabulary that it gets.
        pieces: folder of the subwords that it gets, None if it keeps its own or writes characters.
    """
    nemo = _restored(origin) if origin.has_weights else _made(origin, tokens, pieces)
    nemo._save_restore_connector = connector()
    if origin.has_weights and own is not None:
        _write_in(nemo, own, tokens, pieces)
    if recipe.train.precision == "bf16-true":
        nemo.to(torch.bfloat16)
    nemo.name_or_path = recipe.model.path  # what PEFT notes as its base
    model: nn.Module = nemo
    section = recipe.model
    if section.lora is not None:
        if not origin.has_weights:
            problem = "an adapter on random weights"
            raise ModelError(problem, where="model.lora", given=section.path, do="train the model itself first")
        kept = [*(_ENCODER if section.freeze_encoder else ()), *(_TIED if origin.is_aed else ())]
        excluded = "|".join(rf"{part}(\..*)?" for part in kept)
        model = adapted(nemo, section.lora, weights, exclude_modules=excluded or None)
    for part in _ENCODER if section.freeze_encoder else ():
        if hasattr(nemo, part):
            getattr(nemo, part).requires_grad_(False)
    if recipe.train.gradient_checkpointing:
        _checkpoint_layers(nemo.encoder)
    return model, nemo


def _restored(origin: Origin) -> Any:
    known = getattr(nemo_asr().models, origin.name)
    try:
        return known.restore_from(
            str(origin.file),
            override_config_path=resolved(origin.config),
            map_location=torch.device("cpu"),
            save_restore_connector=connector(),
        )
    except Exception as error:  # whatever NeMo and the classes of the model raise
        raise unreadable(str(origin.file), error) from error


def _made(origin: Origin, tokens: Tokens, pieces: str | None) -> Any:
    """A model with random weights."""
    from omegaconf import OmegaConf, open_dict

    known, config = getattr(nemo_asr().models, origin.name), origin.config
    with open_dict(config):
        if isinstance(tokens, Characters):
            _set_labels(config, tokens.pieces)
        elif pieces is not None:
            config.tokenizer = piece_section(pieces, origin.is_aed)
        config.target = f"{known.__module__}.{known.__name__}"
        # `transcribe` of models with subwords looks in here.
        config.validation_ds = {"defer_setup": True, "use_start_end_token": False}
    try:
        return known(cfg=OmegaConf.create(resolved(config)))
    except Exception as error:  # whatever NeMo and the classes of the model raise
        raise unreadable(str(origin.file), error) from error


def _write_in(nemo: Any, own: Tokens, tokens: Tokens, pieces: str | None) -> None:
    from omegaconf import open_dict

    def renew() -> None:
        if pieces is not None and hasattr(nemo, "prompt"):
            _change_prompted(nemo, pieces)
            return
        if pieces is not None:
            nemo.change_vocabulary(new_tokenizer_dir=pieces, new_tokenizer_type="bpe")
            return
        nemo.change_vocabulary(new_vocabulary=tokens.pieces)
        with open_dict(nemo.cfg):
            _set_labels(nemo.cfg, tokens.pieces)  # NeMo leaves the old ones, and a transducer is built from them

    change(nemo, own, tokens, renew)


def _change_prompted(nemo: Any, pieces: str) -> None:
    """NeMo's `change_vocabulary` leaves the prompt with the old tokenizer, and knows no control tokens in the new."""
    from omegaconf import OmegaConf, open_dict

    section, set_up = piece_section(pieces, True), nemo._setup_tokenizer
    with open_dict(nemo.cfg):
        nemo.cfg.tokenizer = section
    nemo._setup_tokenizer = lambda _: set_up(OmegaConf.create(section))
    try:
        nemo.change_vocabulary(new_tokenizer_dir=pieces, new_tokenizer_type="bpe")
    finally:
        del nemo._setup_tokenizer
    nemo.change_prompt(prompt_defaults=nemo.cfg.get("prompt_defaults"))


def _set_labels(config: Any, labels: list[str]) -> None:
    config.labels = labels
    heads = [section.decoder for section in (config.get("aux_ctc"),) if section is not None]
    for head in heads if "joint" in config else [config.decoder]:
        head.vocabulary, head.num_classes = labels, len(labels)


def _checkpoint_layers(encoder: Any) -> None:
    """Have each layer compute its activations again in the backward pass."""
    layers = getattr(encoder, "layers", None)
    if layers is None:
        problem = "the encoder has no layers whose activations could be computed again"
        raise ModelError(problem, where="train.gradient_checkpointing", given=type(encoder).__name__)
    for layer in layers:
        layer.forward = partial(_again, layer, layer.forward)


def _again(layer: nn.Module, forward: Any, *inputs: Any, **named: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    if not (layer.training and torch.is_grad_enabled()):
        return forward(*inputs, **named)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _unmoved(layer)

    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts, **named)


@contextmanager
def _unmoved(layer: nn.Module) -> Iterator[None]:
    """Leave the running statistics of batch norms alone, which the first run has moved already."""
    norms = [module for module in layer.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    kept = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked = norm.num_batches_tracked.clone()
    try:
        yield
    finally:
        for norm, momentum, counted in kept:
            norm.momentum, norm.num_batches_tracked = momentum, counted
