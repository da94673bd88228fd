"""What a transformers model hears of an utterance alone, as its own feature extractor gives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...common.errors import ModelError
from .audio import Wave


class Extractor:
    """Samples or mel features, without padding.

    Args:
        extractor: transformers' feature extractor.

    Raises:
        ModelError: it pads samples with another value than 0.
    """

    def __init__(self, extractor: Any):
        self.extractor = extractor
        self.rate = int(extractor.sampling_rate)
        self.raw = extractor.model_input_names[0] == "input_values"
        if float(extractor.padding_value) != 0.0 and self.raw:
            raise ModelError(
                "a feature extractor that pads with another value than 0 is not supported",
                where="model.path",
                given=extractor.padding_value,
            )

    @property
    def settings(self) -> str:
        """All that decides the features, as a text for cache keys."""
        return f"{type(self.extractor).__name__} {self.extractor.to_json_string()}"

    def __call__(self, wave: Wave) -> Tensor:
        """Features [F, T] of samples [N]: samples as one feature ([1, N], normalised over these alone) or mel bins."""
        if self.raw:
            found = self.extractor(wave, sampling_rate=self.rate, return_tensors="np").input_values
            samples: Tensor = torch.as_tensor(found[0], dtype=torch.float32)[None]
            return samples
        given = self.extractor([wave], sampling_rate=self.rate, return_tensors="pt", return_attention_mask=True)
        real = int(given.attention_mask[0].sum())
        features: Tensor = given.input_features[0, :real]
        return features.float().T.contiguous()


def batch(features: Sequence[Tensor], raw: bool) -> tuple[Tensor, Tensor]:
    """Inputs padded with zeros, samples [B, N] or features [B, T, F], and their lengths [B].

    Args:
        features: [F, T] of each.
        raw: whether they are samples.
    """
    lengths = torch.tensor([item.shape[1] for item in features])
    padded = torch.nn.utils.rnn.pad_sequence([item.T for item in features], batch_first=True)
    return (padded[..., 0] if raw else padded), lengths
