"""The features of FunASR's `WavFrontend`, in two steps, so that masks and a cache can stand between them.

Log-mel energies first; then low frame rate (several frames side by side, at every n-th frame) and the normalisation by
a fixed mean and variance.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np
import torch
from torch import Tensor

from ....common.errors import ModelError
from ..audio import Wave
from .directory import Directory, registered

FRONTENDS = ("WavFrontend", "wav_frontend", "WavFrontendOnline")


class Frontend:
    """Features of a model directory.

    Args:
        directory: its `frontend_conf` and `am.mvn`.

    Raises:
        ModelError: the model takes other features.
    """

    def __init__(self, directory: Directory):
        name = directory.config["frontend"]
        if name not in FRONTENDS:
            raise ModelError(
                "features of this kind are not supported", where="config.yaml: frontend", given=name,
                expected=" or ".join(FRONTENDS),
            )  # fmt: skip
        settings = {**directory.frontend, "dither": 0.0}
        plain = {**settings, "lfr_m": 1, "lfr_n": 1}
        # The online frontend computes the same; only the offline one takes a whole recording at once.
        self._fbank = registered("frontend", "WavFrontend")(**plain)
        self.stacked, self.hop = int(settings.get("lfr_m", 1)), int(settings.get("lfr_n", 1))
        self.rate, self.bins = int(self._fbank.fs), int(self._fbank.n_mels)
        self._cmvn = None
        if directory.cmvn is not None:
            from funasr.frontends.wav_frontend import load_cmvn  # type: ignore[import-untyped]

            self._cmvn = load_cmvn(str(directory.cmvn))
            if self._cmvn.shape != (2, self.size):
                raise ModelError(
                    "mean and variance do not fit the features", where=directory.cmvn,
                    given=tuple(self._cmvn.shape), expected=(2, self.size),
                )  # fmt: skip
        text = json.dumps(plain, sort_keys=True, default=str)
        self.settings = f"funasr fbank {hashlib.sha256(text.encode()).hexdigest()[:16]}"

    @property
    def size(self) -> int:
        """Values of a frame that the model sees, F."""
        return self.bins * self.stacked

    @property
    def seconds(self) -> float:
        """Time from one such frame to the next."""
        return float(self._fbank.frame_shift) / 1000 * self.hop

    def frames(self, samples: int) -> int:
        """Number of frames that the model sees of so many samples."""
        length, shift = (int(self.rate * ms / 1000) for ms in (self._fbank.frame_length, self._fbank.frame_shift))
        plain = 1 + (samples - length) // shift if self._fbank.snip_edges else (samples + shift // 2) // shift
        return -(-max(plain, 0) // self.hop)

    def energies(self, wave: Wave) -> Tensor:
        """Log-mel energies [bins, T] of samples [N] within -1 and 1; 100 frames a second, as a rule."""
        samples = torch.from_numpy(np.ascontiguousarray(wave, dtype=np.float32))
        features, _ = self._fbank(samples[None], torch.tensor([len(samples)]))
        found: Tensor = features[0].T.contiguous()
        return found

    def assemble(self, energies: Tensor) -> Tensor:
        """What the model sees, [T / n, F], of log-mel energies [bins, T]."""
        from funasr.frontends.wav_frontend import apply_cmvn, apply_lfr

        frames = energies.T.contiguous()
        if self.stacked != 1 or self.hop != 1:
            frames = apply_lfr(frames, self.stacked, self.hop)
        found: Tensor = frames if self._cmvn is None else apply_cmvn(frames.clone(), self._cmvn)
        return found
