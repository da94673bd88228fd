"""A norm over time gives each row of a padded batch what torch's gives the row alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from luthier.modalities.asr.real_norm import RealGroupNorm


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_padding_is_not_seen(groups: int) -> None:
    torch.manual_seed(0)
    norm = nn.GroupNorm(groups, 6).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    real = RealGroupNorm.of(norm)
    hidden, lengths = torch.randn(3, 6, 11, dtype=torch.float64), [11, 4, 7]
    torch.testing.assert_close(real(hidden), norm(hidden))
    real.real = torch.tensor(lengths)
    found = real(hidden).float()  # statistics are taken in float32
    for row, length in enumerate(lengths):
        expected = norm(hidden[row : row + 1, :, :length])[0].float()
        torch.testing.assert_close(found[row, :, :length], expected, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(found[row, :, :length], norm(hidden)[row, :, :length].float()) or length == 11
