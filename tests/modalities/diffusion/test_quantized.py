"""An adapter on a denoiser in 4 bits is that on a denoiser that holds what the 4 bits stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from luthier.common.errors import ModelError
from luthier.common.training.run import train

pytest.importorskip("bitsandbytes")


@pytest.mark.parametrize("pipeline", ["sd", "flux"])
def test_loss_and_gradients_are_those_of_what_the_bits_stand_for(pipeline: str, make_task: Any, batch_of: Any) -> None:
    """The reference is the same adapter on float32 weights that bitsandbytes dequantises."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    small, plain = (make_task(pipeline, model={"quantization": kind}) for kind in ("nf4", "none"))
    layers = {name: layer for name, layer in small.named_modules() if isinstance(layer, Linear4bit)}
    assert len(layers) > 10
    assert not any(layer.support_avx512bf16_for_cpu for layer in layers.values())
    adapters = [dict(task.named_parameters()) for task in (small, plain)]
    trained = sorted(name for name, value in adapters[0].items() if value.requires_grad)
    assert trained == sorted(name for name, value in adapters[1].items() if value.requires_grad)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, layer in layers.items():
            values = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            plain.get_submodule(name).weight.copy_(values)
        for name in trained:
            adapters[0][name].copy_(torch.randn_like(adapters[0][name]) * 0.05)
            adapters[1][name].copy_(adapters[0][name])
    losses = []
    for task in (small, plain):
        torch.manual_seed(1)
        loss = task.loss(batch_of(task))
        loss.sum.backward()
        losses.append(float(loss.sum.detach()) / loss.count)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name in trained:
        torch.testing.assert_close(adapters[0][name].grad, adapters[1][name].grad, rtol=1e-4, atol=1e-6)


def test_it_trains(make_recipe: Any, tmp_path: Any) -> None:
    recipe = make_recipe("sd", model={"quantization": "nf4"}, output=str(tmp_path / "run"))
    assert train(recipe).folder.joinpath("checkpoints/last/model/pytorch_lora_weights.safetensors").is_file()


def test_without_an_adapter_it_is_refused(make_task: Any) -> None:
    with pytest.raises(ModelError, match="4-bit weights can't be trained"):
        make_task("sd", model={"quantization": "nf4", "lora": None})
