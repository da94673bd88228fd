"""A dry run counts what a real step would allocate and compute: derived by hand for a small network."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from luthier.common.estimate.dry import Dry
from luthier.common.estimate.hollow import Hollow

B, IN, WIDE, OUT = 16, 64, 128, 32
FLOAT = 4


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(IN, WIDE), nn.Tanh(), nn.Linear(WIDE, OUT))


@pytest.fixture
def hollow() -> Hollow:
    return Hollow()


def test_operations_of_forward_and_backward(hollow: Hollow) -> None:
    net = hollow.empty(network())
    with Dry(hollow.alive()) as dry:
        loss = net(torch.rand(B, IN)).sum()
        dry.phase = "backward"
        loss.backward()
    products = 2 * B * IN * WIDE, 2 * B * WIDE * OUT
    assert dry.flops["forward"] == sum(products)
    # Each layer's weight has a gradient; what comes before the second layer has one too, the data have none.
    assert dry.flops["backward"] == sum(products) + products[1]
    assert net[0].weight.grad.shape == (WIDE, IN)
    assert isinstance(net[0].weight.grad, FakeTensor)


def test_a_frozen_base_has_no_gradient_of_its_weights(hollow: Hollow) -> None:
    net = hollow.empty(network())
    net[2].requires_grad_(False)
    with Dry(hollow.alive()) as dry:
        loss = net(torch.rand(B, IN)).sum()
        dry.phase = "backward"
        loss.backward()
    assert dry.flops["backward"] == 2 * B * IN * WIDE + 2 * B * WIDE * OUT


def test_what_the_forward_pass_keeps(hollow: Hollow) -> None:
    net = hollow.empty(network())
    data = torch.rand(B, IN)
    with Dry(hollow.alive()) as dry:
        loss = net(data).sum()
        # Tanh keeps its result, which is the second layer's input too; the layers keep inputs and weights; the loss.
        assert dry.live == B * WIDE * FLOAT + FLOAT
        # While tanh runs, the first layer's output is there too.
        assert dry.peak == 2 * B * WIDE * FLOAT
        loss.backward()
        del loss
    gradients = FLOAT * sum(parameter.numel() for parameter in net.parameters())
    assert dry.live == gradients


def test_only_the_chosen_places_are_computed(hollow: Hollow) -> None:
    net = hollow.empty(nn.Linear(IN, OUT))
    chosen = torch.arange(B) % 4 == 0
    with Dry(hollow.alive()) as dry:
        hidden = hollow.empty(nn.Linear(IN, IN))(torch.rand(B, IN))
        assert net(hidden[chosen]).shape == (B // 4, OUT)
    assert dry.flops["forward"] == 2 * B * IN * IN + 2 * (B // 4) * IN * OUT


def test_what_a_hollow_tensor_holds_is_invented(hollow: Hollow) -> None:
    net = hollow.empty(nn.Linear(IN, OUT))
    with Dry(hollow.alive()):
        found = net(torch.rand(B, IN))
        assert float(found.sum()) == 1.0
        assert not bool((found > 0).any())


def test_tied_weights_are_one_tensor(hollow: Hollow) -> None:
    net = nn.ModuleList([nn.Embedding(OUT, IN), nn.Linear(IN, OUT, bias=False)])
    net[1].weight = net[0].weight
    net = hollow.empty(net)
    assert net[0].weight is net[1].weight
    assert sum(tensor.numel() for tensor in hollow.alive()) == OUT * IN


def test_the_table_of_a_ctc_loss_is_counted() -> None:
    """[B, T, 2 L + 1] numbers for the forward variables, and as many for those of the way back."""
    hollow = Hollow()
    frames, batch, tokens, labels = 7, 2, 5, torch.tensor([3, 2])
    targets, lengths = torch.ones(batch, 3, dtype=torch.long), torch.full((batch,), frames)
    layer = hollow.empty(nn.Linear(4, tokens))
    with Dry(hollow.alive()) as dry:
        scores = layer(torch.randn(frames, batch, 4)).log_softmax(-1)
        before = dry.live
        loss = nn.functional.ctc_loss(scores, targets, lengths, labels, reduction="none")
        table = batch * frames * (2 * 3 + 1) * FLOAT
        assert dry.live - before == table + batch * FLOAT
        loss.sum().backward()
    assert layer.weight.grad is not None
