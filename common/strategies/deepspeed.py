"""DeepSpeed's ZeRO by name: optimizer state (1), gradients (2) and weights (3) cut over the ranks, or moved to the CPU.

Rajbhandari et al., ZeRO, arXiv:1910.02054; Ren et al., ZeRO-Offload, arXiv:2101.06840. Written against the sources of
DeepSpeed 0.19: what is used of its inner parts is named where it is used, and tested for all stages on two processes.
"""

from __future__ import annotations

import json
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn

from ..errors import CheckpointError, missing_extra
from ..optim import check_names
from ..recipe import Recipe
from ..task import Task
from . import on_cpu

TAG = "checkpoint"
DESCRIPTION = "luthier.json"
"""Beside DeepSpeed's own files in a checkpoint: what has to agree before any of them is read."""


def parse(name: str) -> tuple[int, bool]:
    """(stage, whether state is kept in CPU memory) of `deepspeed_zero2_offload` and its like."""
    return int(name.removeprefix("deepspeed_zero")[0]), name.endswith("_offload")


def config(recipe: Recipe) -> dict[str, Any]:
    """DeepSpeed's configuration for a recipe.

    The accumulation window is ours (`managed_gradient_accumulation`: each `engine.step` ends one, also the last and
    shorter one of a run), and so is the division: see `ZeRO.finish_gradients`, which also sets the clipping.
    """
    stage, offload = parse(recipe.train.strategy)
    zero: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": True,
        "overlap_comm": stage > 1,  # stage 1 reduces once, at the end of the window: nothing to overlap with
    }
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": not on_cpu(recipe.train)}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": not on_cpu(recipe.train)}
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = False  # model/ is written by the task, under `gathered`
    return {
        "train_micro_batch_size_per_gpu": 1,  # needed, and used for nothing but DeepSpeed's own counting of samples
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW, which needs no compiler where it runs
        "steps_per_print": 2**62,
        **_precision(recipe.train.precision, fp32_sums=stage > 1 or offload),
    }


def _precision(name: str, fp32_sums: bool) -> dict[str, Any]:
    """`bf16-mixed` is autocast over fp32 weights, as under every strategy; `bf16-true` and `16-mixed` are DeepSpeed's
    own modes: 16-bit weights, with fp32 weights behind them in the optimizer.

    Args:
        fp32_sums: add up the gradients of a window in fp32; DeepSpeed's plain stage 1 can't.
    """
    if name == "bf16-mixed":  # no modules whose gradients are communicated in bf16
        return {"torch_autocast": {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}}
    sums = {"data_types": {"grad_accum_dtype": "fp32"}} if fp32_sums else {}
    if name == "bf16-true":
        return {"bf16": {"enabled": True, "check_grad_overflow": True}, **sums}
    if name == "16-mixed":
        return {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}, **sums}
    return {}


def strategy(recipe: Recipe, timeout: timedelta) -> ZeRO:
    """The strategy of a recipe whose `train.strategy` names a stage."""
    if on_cpu(recipe.train):
        os.environ["DS_ACCELERATOR"] = "cpu"  # read at DeepSpeed's first import
    return ZeRO(recipe, timeout)


class ZeRO(DeepSpeedStrategy):
    """Lightning's DeepSpeedStrategy with exact division of the gradient, also on CPU (gloo).

    Args:
        recipe: the resolved recipe.
        timeout: how long a rank waits for the others.
    """

    def __init__(self, recipe: Recipe, timeout: timedelta):
        super().__init__(config=config(recipe))
        self._timeout = timeout  # which Lightning 2.4 takes no argument for
        self.stage, _ = parse(recipe.train.strategy)

    def _format_config(self) -> None:
        """Nothing: `config` is complete."""

    # ------------------------------------------------------------------ processes

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()  # Lightning's own refuses all but CUDA

    def setup_distributed(self) -> None:
        if self.root_device.type != "cpu":
            super().setup_distributed()
            return
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled here and now
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def _init_deepspeed_distributed(self) -> None:
        """As Lightning's, which hands on no time-out in 2.4."""
        import deepspeed

        assert self.cluster_environment is not None
        self._set_node_environment_variables()
        self._process_group_backend = self._get_process_group_backend()
        deepspeed.init_distributed(
            self._process_group_backend, distributed_port=self.cluster_environment.main_port, timeout=self._timeout
        )

    def _setup_model_and_optimizer(self, model: nn.Module, optimizer: Any, lr_scheduler: Any = None) -> Any:
        import deepspeed

        if self.stage == 3:  # one parameter after the other, so that no device ever has to hold them all
            deepspeed.zero.Init(module=model, config_dict_or_path=self.config)
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    module._buffers[name] = None if buffer is None else buffer.to(self.root_device)
        engine, optimizer, _, _ = deepspeed.initialize(
            config=self.config,
            model=model,
            model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dist_init_required=False,
        )
        return engine, optimizer

    def init_deepspeed(self) -> None:
        assert self.model is not None
        self._initialize_deepspeed_train(self.model)  # without Lightning's warning that nothing would be clipped

    # ------------------------------------------------------------------ the optimizer step

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The task's own, as the engine's forward pass.

        The task calls itself in it. The engine's hooks on the task are left out of that second call: stage 3 would
        take it for another step and never learn which layer comes next.
        """
        task = self.lightning_module
        assert task is not None

        def once(*inputs: Any, **named: Any) -> Any:
            del task.__dict__["forward"]
            hooks = task._forward_pre_hooks, task._forward_hooks
            task._forward_pre_hooks, task._forward_hooks = OrderedDict(), OrderedDict()
            try:
                return task.training_step(*inputs, **named)
            finally:
                task._forward_pre_hooks, task._forward_hooks = hooks

        task.__dict__["forward"] = once
        return self.deepspeed_engine(*args, **kwargs)

    @property
    def handles_gradient_accumulation(self) -> bool:
        return False  # Lightning counts the window, and ends the last one of a run early

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        yield  # stages 2 and 3 reduce after each backward pass, stage 1 within the step

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """As of any other precision, but that the step itself is made in `finish_gradients`."""
        assert self.lightning_module is not None
        result = closure()
        self.precision_plugin._after_closure(self.lightning_module, optimizer)
        return result

    def finish_gradients(
        self, optimizer: Any, scale: float, clip_norm: float | None, usable: bool
    ) -> tuple[float, bool]:
        """Multiply the gradient by `scale`, clip its norm and make the step; leave the step out on all ranks if it is
        not usable or the norm is not finite.

        ZeRO's optimizers reduce, divide by their loss scale and clip in one go inside of `engine.step`; so for the one
        step the loss scale is 1 / scale times what the loss was really multiplied with (fp16 only).

        Returns:
            (2-norm after scaling and before clipping, whether the step was made).
        """
        engine = self.deepspeed_engine
        zero = engine.optimizer
        zero.clip_grad = clip_norm or 0.0
        zero.override_loss_scale(zero.loss_scale / (scale or 1.0))
        try:
            if usable and scale:
                engine.step()
            else:
                with _left_out(zero):
                    engine.step()
        finally:
            zero.custom_loss_scaler = False
        return float(zero._global_grad_norm) if scale else 0.0, not zero.overflow

    # ------------------------------------------------------------------ whole weights

    def gathered(self, task: nn.Module, to_save: bool = False) -> AbstractContextManager[None]:
        """Whole weights, to be called on each rank as often as it likes, or (`to_save`) to be read on the first; and
        the first rank's buffers on all, as DDP has them."""
        for buffer in task.buffers():
            torch.distributed.broadcast(buffer, 0)
        if self.stage < 3:
            return nullcontext()
        self.deepspeed_engine.optimizer.parameter_offload.partition_all_parameters()
        return _readable(task, self.is_global_zero) if to_save else self._callable(task)

    @contextmanager
    def _callable(self, task: nn.Module) -> Iterator[None]:
        """Whole weights on every rank; it takes the memory of the whole model. Without the hooks, which would cut a
        layer again after its first use, and make the ranks wait for each other at every layer."""
        import deepspeed

        offload = self.deepspeed_engine.optimizer.parameter_offload
        with deepspeed.zero.GatheredParameters(list(task.parameters())):
            for hook in (*offload.forward_hooks, *offload.backward_hooks):
                hook.remove()
            offload.forward_hooks, offload.backward_hooks = [], []
            try:
                yield
            finally:
                offload._register_deepspeed_module(offload.module)

    # ------------------------------------------------------------------ checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """`filepath` becomes a folder of DeepSpeed's files, one or two of each rank: trained weights, optimizer state
        and the checkpoint's plain values."""
        folder = Path(self.broadcast(filepath))
        plain = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        self.deepspeed_engine.save_checkpoint(
            str(folder), tag=TAG, client_state=plain, save_latest=False, exclude_frozen_parameters=True
        )
        if self.is_global_zero:
            for script in folder.glob("zero_to_*.py"):  # DeepSpeed's converters; model/ is whole already
                script.unlink()
            described = {"stage": self.stage, "ranks": self.world_size, "trained": sorted(checkpoint["state_dict"])}
            (folder / DESCRIPTION).write_text(json.dumps(described))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        task, engine = self.lightning_module, self.deepspeed_engine
        assert isinstance(task, Task)
        trained = dict.fromkeys(self._comparable(Path(checkpoint_path)))
        task.train_mode()  # as it was when the names were saved
        check_names(task, trained)  # before anything is read
        engine.checkpoint_engine.load = _load
        plain: dict[str, Any]
        _, plain = engine.load_checkpoint(
            str(checkpoint_path), tag=TAG, load_module_strict=False, load_lr_scheduler_states=False
        )
        return {**plain, "state_dict": trained}

    def _comparable(self, folder: Path) -> list[str]:
        """Names of what was trained, if the checkpoint can be read here."""
        file = folder / DESCRIPTION
        if not file.is_file():
            raise CheckpointError("the checkpoint was not saved by DeepSpeed", where=folder, do="resume with its own")
        saved = json.loads(file.read_text())
        if saved["stage"] != self.stage or saved["ranks"] != self.world_size:
            raise CheckpointError(
                "DeepSpeed's state can only be read by the same stage on the same number of processes",
                where=folder,
                given=f"zero{self.stage} on {self.world_size} processes",
                expected=f"zero{saved['stage']} on {saved['ranks']} processes",
                do="resume as it was, or start another run from the checkpoint's model/",
            )
        trained: list[str] = saved["trained"]
        return trained


@contextmanager
def _readable(task: nn.Module, here: bool) -> Iterator[None]:
    """Plain whole parameters in the modules of one rank (`here`), in CPU memory; the others only give their parts."""
    import deepspeed

    cut = [
        (module, name, parameter)
        for module in task.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    whole: dict[int, nn.Parameter] = {}  # what is tied stays tied
    for module, name, parameter in cut:
        if id(parameter) not in whole:
            with deepspeed.zero.GatheredParameters([parameter]):
                copy = nn.Parameter(parameter.detach().cpu().clone(), parameter.requires_grad) if here else parameter
            whole[id(parameter)] = copy
        module._parameters[name] = whole[id(parameter)]
    try:
        yield
    finally:
        for module, name, parameter in cut:
            module._parameters[name] = parameter


@contextmanager
def _left_out(zero: Any) -> Iterator[None]:
    """ZeRO takes a step inside for one that overflows, which it gives up on all ranks with nothing changed."""
    update = zero._update_scale  # called between the check and what follows from it

    def overflowing(has_overflow: bool = False) -> None:
        if has_overflow:  # fp16's loss scale falls only if it really was too large
            update(has_overflow)
        zero.overflow = True

    zero._update_scale = overflowing
    try:
        yield
    finally:
        del zero._update_scale


def _load(path: str, map_location: Any = None) -> Any:
    """DeepSpeed's `torch.load(weights_only=False)`, but that it makes nothing but tensors, plain values and the few
    classes of DeepSpeed that hold nothing else."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    allowed: list[Any] = [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]
    with torch.serialization.safe_globals(allowed):
        try:
            return torch.load(path, map_location=map_location, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            reason = str(error).splitlines()[0]
            raise CheckpointError(
                "the state can't be read, or holds more than tensors and plain values", where=path, given=reason
            ) from error


def refuse(recipe: Recipe) -> str | None:
    """Why a strategy of DeepSpeed can't work with this recipe on this machine, or None."""
    section = recipe.train
    stage, _ = parse(section.strategy)
    if find_spec("deepspeed") is None:
        return str(missing_extra("deepspeed", "deepspeed"))
    if section.tensor_parallel:
        return "train.tensor_parallel needs fsdp2+tp"
    if section.accelerator == "mps":
        return "DeepSpeed's ZeRO is tested on CUDA devices and CPU; set train.accelerator"
    if section.precision == "16-mixed" and on_cpu(section):
        return "DeepSpeed computes in fp16 on a GPU only; use bf16-mixed"
    if recipe.optim.name == "adafactor":
        return "adafactor needs whole matrices, and ZeRO gives the optimizer flat pieces of them; use adamw or sgd"
    if section.compile and stage == 3:
        return "torch.compile doesn't see through stage 3's gathering of each layer; use deepspeed_zero2 or fsdp2"
    return None
