"""Models without their weights, so that one of any size can be looked at on any machine.

What a library would read from files is made from the configuration alone; its tensors have shapes and no contents
(torch's fake tensors). Everything else, such as tokenizers and data, is real.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


class Hollow:
    """The tensors of hollow models."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.models = weakref.WeakSet[nn.Module]()

    def alive(self) -> Iterator[torch.Tensor]:
        """Those that some model still has, each once."""
        seen: set[int] = set()
        for model in list(self.models):
            for tensor in (*model.parameters(), *model.buffers()):
                if isinstance(tensor, FakeTensor) and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield tensor

    def empty(self, module: Any) -> Any:
        """The module with tensors without contents, on the CPU as far as anybody can see; tied ones stay tied."""
        self.models.add(module)
        made: dict[int, torch.Tensor] = {}
        for part in module.modules():
            for name, parameter in list(part._parameters.items()):
                if parameter is not None:
                    part._parameters[name] = self._like(parameter, made)
            for name, buffer in list(part._buffers.items()):
                if buffer is not None and buffer.device.type == "meta":
                    part._buffers[name] = self._like(buffer, made)
        return module

    def _like(self, tensor: torch.Tensor, made: dict[int, torch.Tensor]) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in made:
            with self.mode:
                empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            made[id(tensor)] = empty
        return made[id(tensor)]


@contextmanager
def hollow() -> Iterator[Hollow]:
    """Within it, models of transformers and diffusers are made without their weights."""
    made = Hollow()
    with from_configuration("meta", made.empty), patch.object(nn.Module, "_apply", _converter(nn.Module._apply)):
        yield made


def _converter(real: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """`Module._apply` that gives a hollow module other tensors: torch would swap what is in them, which it can't do
    with those that anything refers to weakly, as fake tensors are."""

    def apply(module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        if not any(isinstance(tensor, FakeTensor) for tensor in module.parameters()):
            return real(module, convert, recurse)
        made: dict[int, torch.Tensor] = {}
        for part in module.modules() if recurse else (module,):
            for tensors in (part._parameters, part._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = _converted(tensor, convert, made)  # type: ignore[assignment]
        return module

    return apply


def _converted(
    tensor: torch.Tensor, convert: Callable[[torch.Tensor], torch.Tensor], made: dict[int, torch.Tensor]
) -> torch.Tensor:
    if id(tensor) not in made:
        with torch.no_grad():
            found = convert(tensor)
        if isinstance(tensor, nn.Parameter) and found is not tensor:
            found = nn.Parameter(found, requires_grad=tensor.requires_grad)
        made[id(tensor)] = found
    return made[id(tensor)]


@contextmanager
def from_configuration(device: str, finish: Callable[[Any], Any] = lambda model: model) -> Iterator[None]:
    """Within it, models of transformers and diffusers are made from their configuration alone, on a device, with the
    weights of a model that has learned nothing; `finish` gives the model that is handed out."""
    with ExitStack() as patches:
        if find_spec("transformers"):
            from transformers import PreTrainedModel

            transformer: Any = _transformer(device, finish)
            patches.enter_context(patch.object(PreTrainedModel, "from_pretrained", classmethod(transformer)))
        if find_spec("diffusers"):
            from diffusers import ModelMixin

            diffuser: Any = _diffuser(device, finish)
            patches.enter_context(patch.object(ModelMixin, "from_pretrained", classmethod(diffuser)))
        yield


def _transformer(device: str, finish: Callable[[Any], Any]) -> Any:
    def made(kind: Any, path: Any, *_: Any, config: Any = None, **options: Any) -> Any:
        from transformers import GenerationConfig, PretrainedConfig

        if not isinstance(config, PretrainedConfig):
            place = {"subfolder": options["subfolder"]} if options.get("subfolder") else {}
            config = kind.config_class.from_pretrained(path, **place)
        given = {name: options[name] for name in ("dtype", "attn_implementation") if options.get(name) is not None}
        if "dtype" not in given and options.get("torch_dtype") is not None:
            given["dtype"] = options["torch_dtype"]
        with torch.device(device):
            model = kind._from_config(config, **given)
        if model.can_generate():
            try:
                model.generation_config = GenerationConfig.from_pretrained(path)
            except OSError:
                model.generation_config = GenerationConfig.from_model_config(config)
        return finish(model).eval()

    return made


def _diffuser(device: str, finish: Callable[[Any], Any]) -> Any:
    def made(kind: Any, path: Any, **options: Any) -> Any:
        place = {"subfolder": options["subfolder"]} if options.get("subfolder") else {}
        with torch.device(device):
            model = kind.from_config(kind.load_config(path, **place))
        return finish(model.to(options.get("torch_dtype") or torch.float32)).eval()

    return made
