"""Sharded state: each rank writes its part of the trained weights and of the optimizer's moments, and any number of
ranks reads them back (torch.distributed.checkpoint)."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError

FOLDER = "shards"


def save(task: nn.Module, trained: set[str], optimizer: torch.optim.Optimizer, folder: Path) -> dict[str, Any]:
    """Write `folder/shards`, on all ranks together.

    Args:
        task: the module whose parameters are DTensors.
        trained: names in its state dict that are saved.
        optimizer: over its parameters.

    Returns:
        What `load` needs besides: names, settings of the parameter groups, and the optimizer's plain values.
    """
    tensors: dict[str, Tensor] = {f"model.{k}": value for k, value in task.state_dict().items() if k in trained}
    plain: dict[str, dict[str, Any]] = {}
    cut: dict[str, list[str]] = {}
    for name, parameter in task.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, DTensor):
                tensors[f"optimizer.{name}.{key}"] = value
                cut.setdefault(name, []).append(key)
            else:
                plain.setdefault(name, {})[key] = value
    state_dict_saver.save(tensors, storage_writer=FileSystemWriter(folder / FOLDER))
    groups = [{k: value for k, value in group.items() if k != "params"} for group in optimizer.param_groups]
    return {"model": sorted(trained), "groups": groups, "plain": plain, "cut": cut}


def load(task: nn.Module, optimizer: torch.optim.Optimizer, described: dict[str, Any], folder: Path) -> None:
    """Read `folder/shards` into a task and its optimizer, in place, on all ranks together.

    Args:
        described: what `save` returned.
    """
    parameters = dict(task.named_parameters())
    tensors: dict[str, Tensor] = {f"model.{k}": v for k, v in task.state_dict().items() if k in described["model"]}
    for name, keys in described["cut"].items():
        for key in keys:
            tensors[f"optimizer.{name}.{key}"] = torch.zeros_like(parameters[name].detach())
    state_dict_loader.load(tensors, storage_reader=_Reader(folder / FOLDER))
    for name in described["cut"].keys() | described["plain"].keys():
        cut = {key: tensors[f"optimizer.{name}.{key}"] for key in described["cut"].get(name, [])}
        plain = {key: _beside(value, parameters[name]) for key, value in described["plain"].get(name, {}).items()}
        optimizer.state[parameters[name]] = {**plain, **cut}
    for group, saved in zip(optimizer.param_groups, described["groups"], strict=True):
        group.update(saved)


def _beside(value: Any, parameter: Tensor) -> Any:
    return value.to(parameter.device) if isinstance(value, Tensor) else value


class _Reader(FileSystemReader):
    """Reads the shards' index without running code that it might hold: the index is a pickle."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as stream:
            metadata: Metadata = _IndexUnpickler(stream).load()
        storage = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta, storage.load_id = storage, self.load_id
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    """Knows the classes of an index, and no others."""

    ALLOWED = (
        ("torch.distributed.checkpoint.metadata", None),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
    )

    def find_class(self, module: str, name: str) -> Any:
        known = (module, None) in self.ALLOWED or (module, name) in self.ALLOWED
        if known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        self._refuse(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        self._refuse(f"persistent object {pid}")

    def _refuse(self, what: str) -> NoReturn:
        raise CheckpointError("the index of the shards holds more than descriptions of tensors", given=what)
