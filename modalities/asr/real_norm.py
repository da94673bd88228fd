"""Norms over time that do not see the padding."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RealGroupNorm(nn.GroupNorm):
    """GroupNorm over time that counts real frames only.

    transformers' wav2vec 2.0 with `feat_extract_norm: group` and Moonshine take the statistics over the padding too, so
    that an example's output depends on its batch; here it is what the model gives for the example alone.
    """

    real: Tensor | None = None
    """[B] frames of real audio; None: all."""

    @classmethod
    def of(cls, norm: nn.GroupNorm) -> RealGroupNorm:
        """The same layer with the same parameters."""
        made = cls(norm.num_groups, norm.num_channels, norm.eps, norm.affine)
        made.weight, made.bias = norm.weight, norm.bias
        return made

    def forward(self, hidden: Tensor) -> Tensor:  # [B, D, T]
        if self.real is None:
            plain: Tensor = super().forward(hidden)
            return plain
        real = self.real[:, None, None, None]
        mask = torch.arange(hidden.shape[2], device=hidden.device) < real
        number = real * (self.num_channels // self.num_groups)
        grouped = hidden.float().unflatten(1, (self.num_groups, -1)) * mask  # [B, G, D / G, T]
        mean = grouped.sum((2, 3), keepdim=True) / number
        spread = ((grouped - mean) * mask).square().sum((2, 3), keepdim=True) / number
        normed = ((grouped - mean) * torch.rsqrt(spread + self.eps)).flatten(1, 2)
        scaled: Tensor = normed * self.weight[:, None] + self.bias[:, None]
        return scaled.to(hidden.dtype)


def keep_statistics(model: nn.Module) -> None:
    """Batch norms of a model use the statistics that they have and keep them, as in evaluation."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
