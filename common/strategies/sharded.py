"""FSDP2, alone or with tensor parallelism: no rank holds the whole model while it trains.

Every parameter becomes a DTensor that is cut over the ranks. A layer is gathered just before it is used and given back
after (Zhao et al., PyTorch FSDP, arXiv:2304.11277; torchtitan, arXiv:2410.06511).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..checkpoint import shards
from ..checkpoint.state import TensorIO
from ..errors import CheckpointError
from ..recipe import Recipe
from . import tensor_parallel


class Sharded(ModelParallelStrategy):
    """Lightning's ModelParallelStrategy with state that is saved in shards and read by any number of ranks.

    Args:
        recipe: the resolved recipe.
        tensor_parallel: ranks that share each layer.
        timeout: how long a rank waits for the others.
    """

    def __init__(self, recipe: Recipe, tensor_parallel: int, timeout: timedelta):
        super().__init__(data_parallel_size=1, tensor_parallel_size=tensor_parallel, timeout=timeout)
        self.recipe = recipe

    def setup_environment(self) -> None:
        ranks = self.num_nodes * self.num_processes
        self._data_parallel_size = ranks // int(self._tensor_parallel_size)
        super().setup_environment()

    def shard(self, task: nn.Module) -> None:
        """Cut the parameters of a task over the ranks, in place; Lightning's `configure_model` calls this."""
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if isinstance(task, FSDPModule):
            return
        tensor_parallel.apply(task, self.device_mesh["tensor_parallel"])
        mesh = self.device_mesh["data_parallel"]
        for unit in units(task):
            fully_shard(unit, mesh=mesh)
        fully_shard(task, mesh=mesh)

    def gathered(self, task: nn.Module, to_save: bool = False) -> AbstractContextManager[None]:
        """Whole weights, to be called on each rank as often as it likes, or (`to_save`) to be read on the first."""
        return _readable(task, self.is_global_zero) if to_save else _callable(task)

    # ------------------------------------------------------------------ checkpoint

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.model is not None
        return self.model.state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {}  # saved with the shards

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """`trainer.pt` with the plain values, and the shards beside it."""
        assert self.lightning_module is not None
        del checkpoint["optimizer_states"]
        trained = set(checkpoint.pop("state_dict"))
        checkpoint["sharded"] = shards.save(self.lightning_module, trained, self.optimizers[0], Path(filepath).parent)
        if self.is_global_zero:
            TensorIO().save_checkpoint(checkpoint, filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.lightning_module is not None
        checkpoint = TensorIO().load_checkpoint(checkpoint_path)
        if "sharded" not in checkpoint:
            raise CheckpointError(
                "the checkpoint was not saved by this strategy", where=checkpoint_path, do="resume with its own"
            )
        described = checkpoint.pop("sharded")
        checkpoint["state_dict"] = dict.fromkeys(described["model"])
        self.lightning_module.on_load_checkpoint(checkpoint)  # compares the names before anything is read
        shards.load(self.lightning_module, self.optimizers[0], described, Path(checkpoint_path).parent)
        return checkpoint


@contextmanager
def _callable(task: nn.Module) -> Iterator[None]:
    """Whole weights on every rank, so that none waits for another at each layer; it takes the memory of the model.
    Layers that tensor parallelism has cut stay so."""
    from torch.distributed.fsdp import FSDPModule

    modules = [module for module in task.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.set_reshard_after_forward(module is not task, recurse=False)
            module.reshard()


@contextmanager
def _readable(task: nn.Module, here: bool) -> Iterator[None]:
    """Plain whole parameters in the modules of one rank (`here`), in CPU memory; the others only give their parts."""
    cut = [
        (module, name, parameter)
        for module in task.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if isinstance(parameter, DTensor)
    ]
    whole: dict[int, nn.Parameter] = {}  # what is tied stays tied
    for module, name, parameter in cut:
        if id(parameter) not in whole:
            tensor: Tensor = cast(DTensor, parameter.detach()).full_tensor()
            whole[id(parameter)] = nn.Parameter(tensor.cpu(), parameter.requires_grad) if here else parameter
        module._parameters[name] = whole[id(parameter)]
    try:
        yield
    finally:
        for module, name, parameter in cut:
            module._parameters[name] = parameter


def units(task: nn.Module) -> list[nn.Module]:
    """The modules that are gathered one at a time: the repeated layers, by the model's own list of what may not be
    split (transformers' `_no_split_modules`), or the children of its module lists."""
    wanted: set[str] = set()
    for module in task.modules():
        wanted |= set(getattr(module, "_no_split_modules", None) or ())
    found = [module for module in task.modules() if type(module).__name__ in wanted]
    if not found:
        lists = [module for module in task.modules() if isinstance(module, nn.ModuleList)]
        found = [child for module in lists for child in module]
    inner = {id(child) for unit in found for child in unit.modules() if child is not unit}
    return [unit for unit in found if id(unit) not in inner and any(True for _ in unit.parameters())]


def refuse(recipe: Recipe, model: nn.Module | None) -> str | None:
    """Why FSDP2 can't work with this recipe, or None."""
    section = recipe.train
    if section.precision == "16-mixed":
        return "fp16's loss scaling is not supported with fsdp2; use bf16-mixed"
    if recipe.optim.name == "adafactor":
        return "adafactor's factored moments can't be cut over ranks; use adamw or sgd"
    if section.strategy == "fsdp2":
        return "train.tensor_parallel needs fsdp2+tp" if section.tensor_parallel else None
    if not section.tensor_parallel:
        return "fsdp2+tp needs train.tensor_parallel, the number of devices that share each layer"
    if isinstance(section.devices, int) and section.devices % section.tensor_parallel:
        return f"train.devices ({section.devices}) is no multiple of train.tensor_parallel ({section.tensor_parallel})"
    if recipe.model.lora is not None or getattr(recipe.model, "adapter", None) is not None:
        return "adapters are not cut by tensor parallelism; use fsdp2"
    return None if model is None else tensor_parallel.refuse(model, section.tensor_parallel)
