"""The reference of a policy: a second model, a second adapter, or log-probabilities that were computed once and are
kept by content."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ...common.data.plan import Bounds, cut
from ...common.errors import ModelError
from ...common.evaluation.run import autocast
from .batch import Group, join_groups
from .model import ADAPTER as TRAINED
from .model import load_model, load_tokenizer
from .tokens import Document

ADAPTER = "reference"
"""PEFT's name of a frozen adapter beside the one that is trained."""

_STARTS_AS_THE_MODEL = ("default", "gaussian")


def way(section: Any) -> Literal["base", "adapter", "model"]:
    """What the reference is: the `base` under a new adapter that begins as nothing; the same base under the saved
    `adapter` that the training began with; or else a second `model`."""
    if section.reference is None and section.adapter is not None:
        return "adapter"
    is_new = section.lora is not None and section.lora.init in _STARTS_AS_THE_MODEL
    return "base" if section.reference is None and is_new else "model"


def load_adapter(model: Any, path: str) -> None:
    """Put a frozen copy of a saved adapter beside the one that is trained, on the same base."""
    if ADAPTER not in model.peft_config:
        model.load_adapter(path, ADAPTER, is_trainable=False)
        model.set_adapter(TRAINED)  # the only one with gradient


@contextmanager
def as_reference(model: Any, adapter: bool) -> Iterator[None]:
    """A PEFT model with the reference's adapter, or with none, in evaluation mode; afterwards all is as it was."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    if adapter:
        model.set_adapter(ADAPTER, inference_mode=True)
    else:
        model.base_model.disable_adapter_layers()
    try:
        yield
    finally:
        if adapter:
            model.set_adapter(TRAINED)
        else:
            model.base_model.enable_adapter_layers()
        for module, mode in modes.items():
            module.training = mode


def load(recipe: Any, tokenizer: Any, path: str | None, where: str) -> nn.Module:
    """A second model, frozen.

    Args:
        recipe: its model's settings and precision are used.
        tokenizer: of the first model.
        path: of the second one; None: another copy of `model.path`.
        where: the place of the path in the recipe.

    Raises:
        ModelError: it can't be loaded, or has another tokenizer.
    """
    section = recipe.model
    changes: dict[str, Any] = {"lora": None, "adapter": None, "quantization": "none"}
    if path is not None:
        changes["path"] = path
        check_tokenizer(tokenizer, section.model_copy(update=changes), where)
    plain = recipe.model_copy(
        update={
            "model": section.model_copy(update=changes),
            "train": recipe.train.model_copy(update={"gradient_checkpointing": False}),
        }
    )
    _, causal = load_model(plain, tokenizer, None)
    model: nn.Module = causal.requires_grad_(False).eval()
    return model


def check_tokenizer(mine: Any, section: Any, where: str) -> None:
    """Refuse a second model whose token ids mean something else.

    Raises:
        ModelError: it has another vocabulary.
    """
    other = load_tokenizer(section, None)
    if mine.get_vocab() != other.get_vocab():
        raise ModelError(
            "the model has another tokenizer, so its token ids mean something else",
            where=where,
            given=section.path,
            expected="a model with the same vocabulary",
        )


def fingerprint(model: nn.Module, recipe: Any) -> str:
    """Of a reference: SHA-256 over all parameters that are not trained, by name and content, and the precision."""
    whole = hashlib.sha256(recipe.train.precision.encode())
    for name, parameter in sorted(model.named_parameters()):
        if not parameter.requires_grad:
            whole.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
            plain = parameter.detach().cpu().contiguous().view(-1)
            whole.update(plain.view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def key_of(document: Document) -> bytes:
    """What a document's log-probability depends on beside the model: its tokens, and which carry loss. The chat
    template and the length policy are in them."""
    kept = np.ascontiguousarray(document.ids).tobytes(), np.ascontiguousarray(document.trained).tobytes()
    return hashlib.blake2b(b"".join(kept), digest_size=16).digest()


class Known:
    """Log-probabilities of documents under one reference, in memory and in a file.

    Args:
        folder: where files are kept.
        model: fingerprint of the reference.
    """

    def __init__(self, folder: Path, model: str):
        from safetensors.numpy import load_file

        self.file = folder / f"{model[:32]}.safetensors"
        self.values: dict[bytes, float] = {}
        if self.file.is_file():
            kept = load_file(self.file)
            keys = [bytes(key) for key in kept["keys"]]
            self.values = dict(zip(keys, kept["values"].tolist(), strict=True))

    def of(self, groups: Sequence[Group]) -> Tensor:
        """[A] log-probabilities of all answers of the groups."""
        documents = [group.document(number) for group in groups for number in range(len(group.rests))]
        return torch.tensor([self.values[key_of(one)] for one in documents], dtype=torch.float32)

    def missing(self, groups: Sequence[Group]) -> list[Group]:
        """The groups of which an answer is not known, each once."""
        found = {}
        for group in groups:
            keys = [key_of(group.document(number)) for number in range(len(group.rests))]
            if any(key not in self.values for key in keys):
                found[b"".join(keys)] = group
        return list(found.values())

    def add(self, groups: Sequence[Group], values: Sequence[float]) -> None:
        """Keep the log-probabilities of all answers of some groups; the file is whole or as before."""
        from safetensors.numpy import save

        documents = [group.document(number) for group in groups for number in range(len(group.rests))]
        self.values |= {key_of(one): value for one, value in zip(documents, values, strict=True)}
        if torch.distributed.is_initialized() and torch.distributed.get_rank():
            return
        keys = np.frombuffer(b"".join(self.values), dtype=np.uint8).reshape(-1, 16)
        held = save({"keys": keys.copy(), "values": np.array(list(self.values.values()), dtype=np.float32)})
        self.file.parent.mkdir(parents=True, exist_ok=True)
        new = self.file.with_suffix(".new")
        new.write_bytes(held)
        new.replace(self.file)


def on_gpu(recipe: Any) -> bool:
    """Whether the training will run on a CUDA device."""
    return recipe.train.accelerator in ("auto", "gpu") and torch.cuda.is_available()


@torch.no_grad()
def compute(
    log_probs: Callable[[dict[str, Any]], Tensor], groups: Sequence[Group], recipe: Any, device: torch.device
) -> list[float]:
    """Log-probabilities of all answers of the groups, in their order. Batches depend on the groups only, so the same
    ones give the same numbers; each of several processes computes its share.

    Args:
        log_probs: of a batch.
        groups: of answers.
        recipe: batch size of evaluations, and precision.
        device: of the model.
    """
    costs = np.array([len(group) for group in groups], dtype=np.float64)
    batches = cut(np.argsort(-costs, kind="stable"), costs, Bounds(recipe.evaluate.batch))
    is_split = torch.distributed.is_initialized()
    rank, ranks = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if is_split else (0, 1)
    found: dict[int, list[float]] = {}
    for batch in batches[rank::ranks]:
        chosen = [groups[number] for number in batch]
        made = join_groups(chosen)
        data = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in made.items()}
        with autocast(recipe.train.precision, device):
            values = log_probs(data).float().cpu()
        parts = values.split([len(group.rests) for group in chosen])
        found |= {number: part.tolist() for number, part in zip(batch, parts, strict=True)}
    if is_split:
        shares: list[Any] = [None] * ranks
        torch.distributed.all_gather_object(shares, found)
        found = {number: values for share in shares for number, values in share.items()}
    return [value for number in range(len(groups)) for value in found[number]]
