"""An adapter on a base in 4 bits is that on a base that holds what the 4 bits stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from luthier.common.errors import ModelError
from luthier.modalities.llm.sft.task import Task

pytest.importorskip("bitsandbytes")

QLORA = ("model.quantization=nf4", "model.lora.rank=4", "model.lora.target_modules=all-linear", "train.precision='32'")


def test_loss_and_gradients_are_those_of_the_base_that_the_bits_stand_for(task_of: Any) -> None:
    """The reference is the same adapter on float32 weights that bitsandbytes dequantises."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    made = task_of(*QLORA)
    quantised, data = made.task, made.batch(range(4)).data
    plain = task_of("model.lora.rank=4", "model.lora.target_modules=all-linear", output="plain").task
    layers = {name: layer for name, layer in quantised.named_modules() if isinstance(layer, Linear4bit)}
    assert len(layers) == 7 * quantised.causal.config.num_hidden_layers  # the output layer stays as it is
    assert not any(layer.support_avx512bf16_for_cpu for layer in layers.values())
    with torch.no_grad():
        for name, layer in layers.items():
            values = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            assert float((plain.get_submodule(name).weight - values).abs().max()) > 0
            plain.get_submodule(name).weight.copy_(values)
        for (name, one), (same, other) in zip(
            sorted((n, p) for n, p in quantised.named_parameters() if p.requires_grad),
            sorted((n, p) for n, p in plain.named_parameters() if p.requires_grad),
            strict=True,
        ):
            assert name == same
            one.copy_(torch.randn_like(one) * 0.05)
            other.copy_(one)
    losses = []
    for task in (quantised, plain):
        task.eval()
        loss = task.loss(data)
        loss.sum.backward()
        losses.append(float(loss.sum.detach()) / loss.count)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    gradients = dict(plain.named_parameters())
    for name, parameter in quantised.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-4, atol=1e-6)


def test_without_an_adapter_it_is_refused(recipe_of: Any) -> None:
    with pytest.raises(ModelError, match="4-bit weights can't be trained"):
        Task(recipe_of("model.quantization=nf4", "train.precision='32'"))
