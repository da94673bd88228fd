"""Tensor parallelism by the plan that a transformers model brings (`tp_plan`: pattern of module names -> style).

Colwise and rowwise linear layers as in Shoeybi et al., Megatron-LM, arXiv:1909.08053.
"""

from __future__ import annotations

import fnmatch
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module


class _SharedOverHeads(ParallelStyle):
    """A norm that each rank applies to its own heads: one weight for all, whose gradients are added up.

    Input and output: [B, T, heads, D], of which each rank has its heads.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            input_fn=_of_own_heads,
            output_fn=lambda _, output, mesh: output.to_local(),
        )


def _of_own_heads(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    return (DTensor.from_local(inputs[0], mesh, [Shard(2)], run_check=False),)


def _styles() -> dict[str, ParallelStyle]:
    return {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
        "replicated_with_grad_allreduce": _SharedOverHeads(),
    }


def plan(module: nn.Module) -> dict[str, str]:
    """Style of each submodule, by its name, from the plans of the transformers models inside."""
    found: dict[str, str] = {}
    for prefix, child in module.named_modules():
        patterns: dict[str, str] = getattr(child, "tp_plan", None) or {}
        if patterns:
            names = [name for name, _ in child.named_modules()]
            for pattern, style in patterns.items():
                matched = fnmatch.filter(names, pattern)
                found |= {f"{prefix}.{name}".lstrip("."): style for name in matched}
            return found  # the outermost model's plan covers what is in it
    return found


def refuse(model: nn.Module, ranks: int) -> str | None:
    """Why a model's layers can't be shared by `ranks` devices, or None."""
    styles = plan(model)
    if not styles:
        return "transformers has no tensor-parallel plan for this model; use fsdp2"
    if unknown := sorted(set(styles.values()) - _styles().keys()):
        return f"the model's plan asks for {', '.join(unknown)}, which is not supported; use fsdp2"
    for child in model.modules():
        config = getattr(child, "config", None)
        for field in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(config, field, None)
            if heads and heads % ranks:
                return f"the model's {field} ({heads}) can't be shared equally by {ranks} devices"
    return None


def apply(task: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the layers of the plan over the ranks of `mesh`, in place; nothing to do for one rank."""
    if mesh.size() > 1:
        styles = _styles()
        tied = _tied(task)
        parallelize_module(task, mesh, {name: styles[style] for name, style in plan(task).items() if name not in tied})


def _tied(task: nn.Module) -> set[str]:
    """Modules of the plan whose weight another module holds too: both stay whole, so that they stay one."""
    seen: dict[int, list[str]] = {}
    for name in plan(task):
        weight: Any = getattr(task.get_submodule(name), "weight", None)
        seen.setdefault(id(weight), []).append(name)
    return {name for names in seen.values() if len(names) > 1 for name in names}
