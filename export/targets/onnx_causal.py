"""Causal language models as one ONNX graph with a cache: a prompt and each token after it are the same step.

Names and axes are those that Optimum gave: `input_ids`, `attention_mask`, `position_ids`, `past_key_values.N.key|value`
in, `logits`, `present.N.key|value` out.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...common.errors import ExportError
from ...common.exportable import greedy
from ..graph import Session, quantise
from ..graph import write as write_graph
from ..source import Source
from .merged import WEIGHTS

needs_whole = True
FILE = "model.onnx"
ROWS, BEFORE, NEW = 2, 5, 3
"""Sizes of the example: each another, so that none is taken for another."""
LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers whose state is keys and values of all tokens."""

Cache = dict[str, np.ndarray]


class Step(nn.Module):
    """A causal language model of transformers as a function of tensors.

    Args:
        causal: the model.
    """

    def __init__(self, causal: Any):
        super().__init__()
        self.causal = causal
        known = inspect.signature(causal.forward).parameters
        self.name = "cache" if "cache" in known else "past_key_values"  # its name before transformers 5.24

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        """Logits [B, T, V], then keys and values [B, H, P + T, W] of each layer after these tokens.

        Args:
            given: tokens [B, T], mask [B, P + T], places [B, T], and keys and values [B, H, P, W] of the P tokens
                before, layer by layer.
        """
        from transformers import DynamicCache

        tokens, mask, places, *past = given
        cache: Any = DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
        options = {"attention_mask": mask, "position_ids": places, self.name: cache, "use_cache": True}
        logits: Tensor = self.causal(input_ids=tokens, **options).logits
        return (logits, *(part for layer in cache.layers for part in (layer.keys, layer.values)))


def write(source: Source, directory: Path, dtype: str) -> None:
    """Write the graph, with tokenizer and settings beside it."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"attn_implementation": "eager", "dtype": torch.float32}
    causal: Any = AutoModelForCausalLM.from_pretrained(source.merged, **options).eval()
    shutil.copytree(source.merged, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*WEIGHTS))
    step = Step(causal)
    sizes = state(step)
    names = [f"{number}.{part}" for number in range(len(sizes) // 2) for part in ("key", "value")]
    inputs = {
        "input_ids": torch.ones(ROWS, NEW, dtype=torch.long),
        "attention_mask": torch.ones(ROWS, BEFORE + NEW, dtype=torch.long),
        "position_ids": torch.arange(BEFORE, BEFORE + NEW).repeat(ROWS, 1),
    }
    axes = {name: {0: "batch", 1: "tokens"} for name in inputs} | {"attention_mask": {0: "batch", 1: "all_tokens"}}
    for name, (heads, width) in zip(names, sizes, strict=True):
        inputs[f"past_key_values.{name}"] = torch.zeros(ROWS, heads, BEFORE, width)
        axes[f"past_key_values.{name}"] = {0: "batch", 2: "past_tokens"}
    write_graph(step, inputs, ["logits", *(f"present.{name}" for name in names)], axes, directory / FILE)
    if dtype == "int8":
        quantise(directory / FILE, ["MatMul", "Gemm"])


def state(step: Step) -> list[tuple[int, int]]:
    """(heads, width) of the keys and of the values of each layer.

    Raises:
        ExportError: the model remembers other things than keys and values of all tokens.
    """
    config = step.causal.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or LAYERS)
    if other := kinds - LAYERS:
        raise ExportError(
            "no ONNX for models with such layers", where="model.path", given=", ".join(sorted(other)),
            expected=" or ".join(sorted(LAYERS)), do="--to merged",
        )  # fmt: skip
    ids = torch.ones(1, NEW, dtype=torch.long)
    with torch.no_grad():
        _, *found = step(ids, ids, torch.arange(NEW)[None])
    if not found or any(one.dim() != 4 or one.shape[2] != NEW for one in found):
        raise ExportError("the model keeps no keys and values of its tokens", where="model.path", do="--to merged")
    return [(one.shape[1], one.shape[3]) for one in found]


class Runner:
    """The graph in onnxruntime."""

    def __init__(self, directory: Path):
        self.session = Session(directory / FILE)
        past = [one for one in self.session.session.get_inputs() if one.name.startswith("past_key_values.")]
        self.empty: Cache = {one.name: np.zeros((1, one.shape[1], 0, one.shape[3]), np.float32) for one in past}

    def _step(self, ids: Sequence[int], cache: Cache, before: int) -> tuple[np.ndarray, Cache]:
        """(logits [T, V] of tokens that follow `before` others, the cache after them)."""
        places = np.arange(before, before + len(ids))[None]
        mask = np.ones((1, before + len(ids)), np.int64)
        given = {"input_ids": np.array([ids], np.int64), "attention_mask": mask, "position_ids": places}
        found = self.session(cache | given)
        logits = found.pop("logits")[0]
        return logits, {name.replace("present", "past_key_values"): value for name, value in found.items()}

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """[T, V] float32."""
        return self._step(ids, self.empty, 0)[0]

    def generate(self, ids: Sequence[int], most: int, ends: Collection[int]) -> list[int]:
        """The most probable tokens after a prompt, up to the first that ends the answer."""
        cache, before = self.empty, 0

        def step(new: list[int]) -> np.ndarray:
            nonlocal cache, before
            logits, cache = self._step(new, cache, before)
            before += len(new)
            last: np.ndarray = logits[-1]
            return last

        answer: list[int] = greedy(step, ids, most, ends, lambda _, logits: logits).ids
        return answer


def runner(source: Source, directory: Path, dtype: str) -> Runner:
    """The artifact in onnxruntime."""
    return Runner(directory)
