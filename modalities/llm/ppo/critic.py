"""What is expected before each token: a linear layer on the policy's last hidden state."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

FOLDER = "value_head"
"""Beside the model's weights, in a folder of its own, as servers load every safetensors file of the model's."""


class ValueHead(nn.Linear):
    """In float32, whatever the model is in; it begins by expecting nothing.

    Args:
        width: of the hidden states D.
        folder: of a saved model; if a head was saved with it, that is taken.
    """

    def __init__(self, width: int, folder: Path):
        super().__init__(width, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)
        if (file := folder / FOLDER / "model.safetensors").is_file():
            from safetensors.torch import load_file

            self.load_state_dict(load_file(file))

    def forward(self, hidden: Tensor) -> Tensor:
        """[N] values from hidden states [N, D]."""
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float())[:, 0]

    def save(self, folder: Path) -> None:
        """Write it beside a saved model."""
        from safetensors.torch import save_file

        (folder / FOLDER).mkdir()
        state = {name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
        save_file(state, folder / FOLDER / "model.safetensors")
