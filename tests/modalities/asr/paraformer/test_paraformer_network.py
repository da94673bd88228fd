"""The faster parts of the network: values and gradients of FunASR's own, and dropout by its definition."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from luthier.modalities.asr.paraformer import network


def hastened(part: nn.Module) -> nn.Module:
    """A copy with the faster parts."""
    found = copy.deepcopy(part)
    network.hasten_network(nn.ModuleList([found]))
    assert "forward" in vars(found)
    return found


def compared(part: nn.Module, faster: nn.Module, *inputs: Any) -> None:
    """Both give the same and send back the same, in double precision."""
    found, expected = (module(*inputs) for module in (faster, part))
    found, expected = (one if isinstance(one, tuple) else (one,) for one in (found, expected))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    weigh = torch.randn_like(expected[0])
    for one in (found, expected):
        (one[0] * weigh).sum().backward()
    for (name, one), other in zip(faster.named_parameters(), part.parameters(), strict=True):
        assert other.grad.abs().max() > 1e-6, name
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize(("frames", "bins"), [(21, 20), (22, 23), (7, 8)])
def test_subsampling_equals_funasr(frames, bins):
    from funasr.models.transformer.utils.subsampling import Conv2dSubsampling

    torch.manual_seed(0)
    part = Conv2dSubsampling(bins, 6, 0.0, nn.Identity()).double()
    mask = torch.ones(3, 1, frames, dtype=torch.bool)
    mask[1, :, frames - 2 :] = False
    features = torch.randn(3, frames, bins, dtype=torch.float64)
    compared(part, hastened(part), features, mask)
    assert part(features, None)[1] is hastened(part)(features, None)[1] is None


def test_subsampling_passes_a_gradient_on_to_what_is_before_it():
    """Where features have a gradient, FunASR's own is used; between the two convolutions ours has to be right too."""
    from torch.autograd import gradcheck

    hidden = torch.randn(2, 7, 8, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(network._Halving.apply, (hidden, weight, bias))


def test_a_conformer_s_convolutions_equal_funasr():
    """In training, with the statistics of the batch."""
    from funasr.models.conformer.encoder import ConvolutionModule

    torch.manual_seed(0)
    part = ConvolutionModule(6, 5, nn.SiLU()).double()
    nn.init.normal_(part.norm.weight)
    hidden = torch.randn(3, 11, 6, dtype=torch.float64)
    faster = hastened(part)
    part.depthwise_conv.bias = faster.depthwise_conv.bias = None  # the norm after it takes it out again
    compared(part, faster, hidden)
    torch.testing.assert_close(part.norm.running_var, faster.norm.running_var)


def test_swish_and_dropout_take_their_places(make_task, conformer):
    from funasr.models.transformer.utils.nets_utils import get_activation

    model = make_task(conformer).paraformer
    kinds = {type(module) for module in model.modules()}
    assert not {nn.Dropout, type(get_activation("swish"))} & kinds
    assert {network.Dropout, nn.SiLU} <= kinds


def test_dropout_keeps_the_mean_and_drops_its_share():
    """0.1 is 6554 / 65536, rounded; of 400,000 draws the share is within 4 standard deviations (0.0019)."""
    layer, ones = network.Dropout(0.1).train(), torch.ones(400, 1000, requires_grad=True)
    torch.manual_seed(0)
    found = layer(ones)
    assert float((found == 0).float().mean()) == pytest.approx(0.1, abs=0.0019)
    assert found.unique().tolist() == pytest.approx([0.0, 65536 / (65536 - 6554)])
    (gradient,) = torch.autograd.grad(found.sum(), ones)
    assert torch.equal(gradient, found)
    torch.manual_seed(0)
    assert torch.equal(layer(ones), found)
    assert not torch.equal(layer(ones), found)


def test_dropout_of_neighbours_is_independent():
    """The four elements that share a draw: how often both of two are dropped is 0.25, within 4 standard deviations."""
    torch.manual_seed(0)
    dropped = network.kept(torch.empty(20000, 4), 0.5) == 0
    both = torch.stack([(dropped[:, a] & dropped[:, b]).float().mean() for a in range(4) for b in range(a)])
    torch.testing.assert_close(both, torch.full((6,), 0.25), rtol=0, atol=0.0123)


@pytest.mark.parametrize("shape", [(3,), (1, 1), (5, 7)])
def test_dropout_of_any_number_of_elements(shape):
    assert network.Dropout(0.5).train()(torch.ones(shape)).shape == shape


def test_dropout_does_nothing_where_it_has_nothing_to_do():
    values = torch.randn(4)
    assert torch.equal(network.Dropout(0.5).eval()(values), values)
    assert torch.equal(network.Dropout(0.0).train()(values), values)
    assert not network.Dropout(1.0).train()(values).any()
