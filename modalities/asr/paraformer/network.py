"""Parts of FunASR's networks in a form that does less work on a CPU and gives the same values and gradients, within
rounding; what dropout draws is as likely as torch's, but not the same.

They take the place of the parts of one model; FunASR's own classes stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_STEPS = 1 << 16


def hasten_network(model: nn.Module) -> None:
    """Give a FunASR model the faster parts, as far as it has what they replace."""
    from funasr.models.conformer.encoder import ConvolutionModule  # type: ignore[import-untyped]
    from funasr.models.transformer.utils.nets_utils import get_activation  # type: ignore[import-untyped]
    from funasr.models.transformer.utils.subsampling import Conv2dSubsampling  # type: ignore[import-untyped]

    swish = type(get_activation("swish"))
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Dropout:
                setattr(module, name, Dropout(child.p))
            elif type(child) is swish:
                setattr(module, name, nn.SiLU())
        if type(module) is Conv2dSubsampling:
            module.forward = partial(_subsample, module, module.forward)
        elif type(module) is ConvolutionModule:
            module.forward = partial(_convolve, module, module.forward)


# ------------------------------------------------------------------------------------------------ dropout


class Dropout(nn.Dropout):
    """Dropout that draws 16 random bits for an element on a CPU, where torch draws 53: a quarter of its time.

    The probability is rounded to 1 / 65536, and the scale is that of the rounded one.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.training or not 0 < self.p < 1 or hidden.device.type != "cpu":
            return super().forward(hidden)
        return hidden * kept(hidden, self.p)


def kept(hidden: Tensor, probability: float) -> Tensor:
    """A mask of a tensor's shape: 0 with the probability, else what keeps the mean."""
    dropped = round(probability * _STEPS)
    drawn = torch.empty(-(-hidden.numel() // 4), dtype=torch.int64).random_(-(1 << 63), None)
    bits = drawn.view(torch.int16)[: hidden.numel()].view(hidden.shape)
    mask = torch.empty(hidden.shape, dtype=hidden.dtype)
    return torch.ge(bits, dropped - _STEPS // 2, out=mask).mul_(_STEPS / (_STEPS - dropped))


# ------------------------------------------------------------------------------------------------ convolutions


class _Halving(torch.autograd.Function):
    """Convolution of 3 x 3 with a stride of 2 over hidden states [B, T, F, C], channels last.

    The gradient of the weight is taken by nine products of matrices, which on a CPU is faster than oneDNN's own.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        found = functional.conv2d(hidden.permute(0, 3, 1, 2), weight, bias, stride=2)
        return found.permute(0, 2, 3, 1).contiguous()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        gradient = outputs[0].contiguous()
        before, kernel, offset = None, None, None
        if ctx.needs_input_grad[0]:
            before = torch.ops.aten.convolution_backward(
                gradient.permute(0, 3, 1, 2), hidden.permute(0, 3, 1, 2), weight, None,
                [2, 2], [0, 0], [1, 1], False, [0, 0], 1, [True, False, False],
            )[0].permute(0, 2, 3, 1)  # fmt: skip
        flat = gradient.flatten(0, 2)
        if ctx.needs_input_grad[1]:
            _, time, width, _ = gradient.shape
            kernel = torch.empty_like(weight)
            for row in range(3):
                for column in range(3):
                    seen = hidden[:, row : row + 2 * time : 2, column : column + 2 * width : 2]
                    kernel[:, :, row, column] = flat.T @ seen.flatten(0, 2)
        if ctx.needs_input_grad[2]:
            offset = flat.sum(0)
        return before, kernel, offset


def _windows(features: Tensor, time: int, width: int) -> Tensor:
    """Every second window of 3 x 3 of features [B, T, F], as rows [B * time * width, 9]."""
    rows, step, place = features.stride()
    shape = (len(features), time, width, 3, 3)
    return features.as_strided(shape, (rows, 2 * step, 2 * place, step, place)).reshape(-1, 9)


def _subsample(module: Any, original: Callable[..., Any], features: Tensor, mask: Tensor | None) -> Any:
    """The forward of `Conv2dSubsampling`: a quarter of the frames, of features [B, T, F]."""
    first, _, second, _ = module.conv
    plain = type(first) is nn.Conv2d and type(second) is nn.Conv2d  # not adapted
    if features.device.type != "cpu" or torch.is_autocast_enabled("cpu") or features.requires_grad or not plain:
        return original(features, mask)
    time, width = ((size - 1) // 2 for size in features.shape[1:])
    seen = torch.addmm(first.bias, _windows(features, time, width), first.weight.flatten(1).T)
    hidden = seen.view(len(features), time, width, -1).relu_()
    hidden = _Halving.apply(hidden, second.weight, second.bias).relu()
    found = module.out(hidden.transpose(2, 3).flatten(2))
    return found, None if mask is None else mask[:, :, :-2:2][:, :, :-2:2]


def _convolve(module: Any, original: Callable[..., Any], hidden: Tensor) -> Any:
    """The forward of a Conformer's `ConvolutionModule` on [B, T, D]; convolutions of one frame are matrices."""
    before, after = module.pointwise_conv1, module.pointwise_conv2
    if type(before) is not nn.Conv1d or type(after) is not nn.Conv1d:  # adapted
        return original(hidden)
    gated = functional.glu(functional.linear(hidden, before.weight.squeeze(2), before.bias))
    mixed = module.activation(module.norm(module.depthwise_conv(gated.transpose(1, 2))))
    return functional.linear(mixed.transpose(1, 2), after.weight.squeeze(2), after.bias)
