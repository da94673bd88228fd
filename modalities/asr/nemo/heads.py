"""What stands on NeMo's encoders: their losses, one for each example, and their decoding. Both are NeMo's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ....common.errors import ModelError
from .tdt import tdt

REDUCTIONS = ("mean_batch", "mean_volume", "mean")


class Head(ABC):
    """A model's decoder.

    Args:
        nemo: NeMo's model.
        reduction: what its mean loss is over: examples (`mean_batch`), their tokens together (`mean_volume`), or
            examples after dividing each by its tokens (`mean`).
    """

    names: tuple[str, ...] = ()
    """Parts of the loss that are logged."""

    def __init__(self, nemo: Any, reduction: str | None):
        if reduction not in REDUCTIONS:
            problem = "a loss that isn't a mean depends on how examples are batched"
            raise ModelError(problem, where="ctc_reduction or rnnt_reduction", given=reduction, expected=REDUCTIONS)
        self.nemo, self.reduction = nemo, reduction

    @abstractmethod
    def losses(self, encoded: Tensor, frames: Tensor, data: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses [B] in nats, and their parts by name, of the encoder's output [B, D, T] with its frames [B]; infinite
        where the text can't be aligned."""

    @abstractmethod
    def texts(self, encoded: Tensor, frames: Tensor, data: dict[str, Any]) -> list[str]:
        """Transcripts."""

    def lengths(self, data: dict[str, Any]) -> Tensor:
        """Tokens of each example that carry loss [B]."""
        found: Tensor = data["lengths"]
        return found

    def weighed(self, losses: Tensor, lengths: Tensor) -> tuple[Tensor, float]:
        """(sum, count) whose ratio is the model's mean loss; over any number of batches it is the ratio of their sums.

        Args:
            losses: [B].
            lengths: tokens of each, [B].
        """
        if self.reduction == "mean_volume":
            return losses.sum(), float(lengths.sum())
        if self.reduction == "mean":
            losses = losses / lengths.clamp(min=1)
        return losses.sum(), float(len(losses))


class Ctc(Head):
    def __init__(self, nemo: Any, loss: str = "loss", decoder: str = "decoder", section: Any = None):
        section = nemo.cfg if section is None else section
        super().__init__(nemo, section.get("ctc_reduction", "mean_batch"))
        self.decoder, self.loss, self.hybrid = getattr(nemo, decoder), getattr(nemo, loss), loss == "ctc_loss"
        self.loss.reduction = self.loss.config_reduction = "none"
        self.loss._apply_reduction = False
        self.loss.zero_infinity = False  # NeMo's way to not notice what can't be aligned

    def losses(self, encoded: Tensor, frames: Tensor, data: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        log_probs = self.decoder(encoder_output=encoded).float()
        losses = self.loss(
            log_probs=log_probs, targets=data["tokens"], input_lengths=frames, target_lengths=data["lengths"]
        )
        return losses, {}

    def texts(self, encoded: Tensor, frames: Tensor, data: dict[str, Any]) -> list[str]:
        log_probs = self.decoder(encoder_output=encoded).float()
        decoding = self.nemo.ctc_decoding if self.hybrid else self.nemo.decoding
        return best_texts(decoding.ctc_decoder_predictions_tensor(log_probs, decoder_lengths=frames))


class Transducer(Head):
    """RNN-T and TDT.

    Args:
        nemo: NeMo's model.
        joint_batch: examples whose joint network is computed together; None: the model's own.
    """

    def __init__(self, nemo: Any, joint_batch: int | None = None):
        from nemo.collections.asr.losses.rnnt import RNNTLoss

        super().__init__(nemo, nemo.cfg.get("rnnt_reduction", "mean_batch"))
        joint = nemo.joint
        self.joint_batch = joint_batch or (joint.fused_batch_size if joint.fuse_loss_wer else None)
        name, settings = nemo.extract_rnnt_loss_cfg(nemo.cfg.get("loss"))
        # After a change of vocabulary NeMo's own has neither the reduction nor, for TDT, the blank of the model.
        blank = joint.num_classes_with_blank - 1 - (joint.num_extra_outputs if name.startswith("tdt") else 0)
        self.loss = RNNTLoss(blank, reduction=None, loss_name=name, loss_kwargs=deepcopy(settings))
        self.durations = tuple(settings.durations) if name.startswith("tdt") else ()
        self.sigma = float(settings.get("sigma", 0.0)) if self.durations else 0.0

    def losses(self, encoded: Tensor, frames: Tensor, data: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        tokens, lengths = data["tokens"], data["lengths"]
        predicted = self.nemo.decoder(targets=tokens, target_length=lengths)[0]
        batch = self.joint_batch or len(tokens)
        found = []
        for begin in range(0, len(tokens), batch):
            rows = slice(begin, begin + batch)
            steps, most = int(frames[rows].max()), int(lengths[rows].max())
            inputs = (encoded[rows, :, :steps], predicted[rows, :, : most + 1], tokens[rows, :most])
            if batch < len(tokens) and torch.is_grad_enabled():
                found.append(checkpoint(self._losses, *inputs, frames[rows], lengths[rows], use_reentrant=False))
            else:
                found.append(self._losses(*inputs, frames[rows], lengths[rows]))
        return torch.cat(found), {}

    def _losses(self, encoded: Tensor, predicted: Tensor, tokens: Tensor, frames: Tensor, lengths: Tensor) -> Tensor:
        """Losses [B] of an encoder's output [B, D, T] and a prediction network's [B, D, U + 1] for tokens [B, U]."""
        joint = self.nemo.joint.joint(encoded.transpose(1, 2), predicted.transpose(1, 2)).float()  # [B, T, U + 1, V]
        if self.durations and joint.device.type == "cpu":
            return tdt(joint, tokens, frames, lengths, self.durations, self.sigma)
        losses: Tensor = self.loss(log_probs=joint, targets=tokens, input_lengths=frames, target_lengths=lengths)
        return losses

    def texts(self, encoded: Tensor, frames: Tensor, data: dict[str, Any]) -> list[str]:
        return best_texts(self.nemo.decoding.rnnt_decoder_predictions_tensor(encoded, frames))


class Hybrid(Head):
    """A transducer and a CTC head on one encoder, their losses mixed by the model's `ctc_loss_weight`.

    Args:
        nemo: NeMo's model.
        joint_batch: as of `Transducer`.
        by_ctc: transcribe by the CTC head.
    """

    names = ("rnnt", "ctc")

    def __init__(self, nemo: Any, joint_batch: int | None, by_ctc: bool):
        self.transducer = Transducer(nemo, joint_batch)
        self.ctc = Ctc(nemo, "ctc_loss", "ctc_decoder", nemo.cfg.aux_ctc)
        super().__init__(nemo, self.transducer.reduction)
        self.by_ctc, self.weight = by_ctc, float(nemo.ctc_loss_weight)
        if self.ctc.reduction != self.reduction and self.weight:
            raise ModelError(
                "the two losses are means over different things",
                where="aux_ctc.ctc_reduction",
                given=f"{self.ctc.reduction} beside rnnt_reduction {self.reduction}",
                do="set both alike in model.config",
            )
        if not self.weight:
            nemo.ctc_decoder.requires_grad_(False)

    def losses(self, encoded: Tensor, frames: Tensor, data: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        rnnt, _ = self.transducer.losses(encoded, frames, data)
        if not self.weight:
            return rnnt, {"rnnt": rnnt}
        ctc, _ = self.ctc.losses(encoded, frames, data)
        return (1 - self.weight) * rnnt + self.weight * ctc, {"rnnt": rnnt, "ctc": ctc}

    def texts(self, encoded: Tensor, frames: Tensor, data: dict[str, Any]) -> list[str]:
        return (self.ctc if self.by_ctc else self.transducer).texts(encoded, frames, data)


def best_texts(hypotheses: Any) -> list[str]:
    """The best text of each, from NeMo's lists of hypotheses or of their beams."""
    best = [item[0] if isinstance(item, list) else item for item in hypotheses]
    return [str(getattr(item, "text", item)) for item in best]
