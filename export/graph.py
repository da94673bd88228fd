"""Writing a torch module as an ONNX graph, running it, and keeping its weights in 8 bits."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..common.errors import ExportError

Axes = Mapping[str, Mapping[int, str]]
"""Of each input, the axes whose size may change, by name."""

LARGEST = 2**31 - 2**27
"""Bytes of weights above which they lie in a file of their own: a protobuf holds 2 GB at most."""
OPSET = 17
"""Of the older exporter."""
APART = ".data"
"""What torch adds to the graph's name for that file."""


def write(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    outputs: Sequence[str],
    axes: Axes,
    file: Path,
    scripted: bool = False,
) -> None:
    """Write a module's graph.

    Args:
        module: called with the tensors of `inputs` in their order, gives a tensor or a tuple of them.
        inputs: by name; each axis that may change has a size of its own above 1.
        outputs: names.
        axes: what may change.
        file: to be written.
        scripted: use torch's older exporter, which takes modules with parts in TorchScript, whose branches and sizes
            follow from numbers.
    """
    shapes = tuple(dict(axes.get(key, {})) or None for key in inputs)
    weights = sum(value.nbytes for value in module.state_dict().values())
    newer = {"dynamic_shapes": (shapes,) if _is_variadic(module) else shapes, "external_data": weights > LARGEST}
    older = {"dynamic_axes": axes, "opset_version": OPSET}
    options: dict[str, Any] = older if scripted else newer
    levels = {name: logging.getLogger(name).level for name in ("torch.onnx", "onnxscript")}
    for name in levels:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                module.eval(),
                tuple(value.clone() for value in inputs.values()),  # one tensor given twice would become one input
                str(file),
                input_names=list(inputs),
                output_names=list(outputs),
                dynamo=not scripted,
                verbose=False,
                **options,
            )
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
    _check(file, axes)


def _check(file: Path, axes: Axes) -> None:
    """Raise ExportError if a size that may change has become that of the example."""
    import onnx

    for value in onnx.load(str(file), load_external_data=False).graph.input:
        for axis, name in axes.get(value.name, {}).items():
            if value.type.tensor_type.shape.dim[axis].HasField("dim_value"):
                raise ExportError(f"the graph works for one number of {name} only", where=f"{file.name}: {value.name}")


def _is_variadic(module: nn.Module) -> bool:
    """Whether `forward` takes `*given`, which torch.export counts as one argument."""
    return bool(module.forward.__code__.co_flags & 0x04)


def describe(file: Path, facts: Mapping[str, object]) -> None:
    """Add facts to a graph's metadata, where programs look for settings."""
    import onnx

    graph = onnx.load(str(file), load_external_data=False)
    onnx.helper.set_model_props(graph, {name: str(value) for name, value in facts.items()})
    onnx.save(graph, str(file))


def quantise(file: Path, operators: Sequence[str] | None = None) -> None:
    """Keep the weights of a graph in 8 bits; activations are rounded to 8 bits as they come.

    Args:
        file: is written over.
        operators: those whose weights are rounded, such as `MatMul`; None: all that onnxruntime can.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    small = file.with_name(f".{file.name}.int8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        root = logging.getLogger()
        level = root.level
        root.setLevel(logging.ERROR)  # it advises a preparation that torch's graphs have had
        try:
            quantize_dynamic(
                str(file), str(small), operators and list(operators), weight_type=QuantType.QInt8, per_channel=True
            )
        finally:
            root.setLevel(level)
    small.replace(file)
    file.with_name(f"{file.name}{APART}").unlink(missing_ok=True)  # the weights that were rounded


class Session:
    """A graph in onnxruntime, on the CPU."""

    def __init__(self, file: Path):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        self.inputs = [one.name for one in self.session.get_inputs()]
        self.outputs = [one.name for one in self.session.get_outputs()]

    def __call__(self, given: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Outputs by name; inputs that the graph does not need are left out."""
        found = self.session.run(None, {name: given[name] for name in self.inputs})
        return dict(zip(self.outputs, found, strict=True))
