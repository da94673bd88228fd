"""The attention decoder of Canary models: cross-entropy of its tokens, and NeMo's search for the best of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....common.errors import ModelError
from .heads import Head, best_texts


class Aed(Head):
    """A Transformer that reads the prompt and writes the transcript, with the encoder's output beside it.

    Args:
        nemo: NeMo's model.
        most: tokens of a transcript, at most.
    """

    def __init__(self, nemo: Any, most: int):
        super().__init__(nemo, "mean_volume")
        self.loss, self.most = nemo.loss, most
        kind = type(nemo.loss).__name__
        if kind != "SmoothedCrossEntropyLoss" or nemo.loss._predict_last_k:
            raise ModelError(
                "a loss other than the mean over tokens depends on how examples are batched",
                where="loss",
                given=dict(nemo.cfg.loss),
                expected="SmoothedCrossEntropyLoss with predict_last_k: 0",
            )
        self.loss._per_token_reduction = False  # one for each token
        self.asks_prompt = not nemo.cfg.get("use_loss_mask_for_prompt", False)

    def states(self, encoded: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        """What the decoder attends to [B, T, D], and where it is real [B, T]."""
        nemo = self.nemo
        states = nemo.encoder_decoder_proj(encoded.transpose(1, 2))
        mask = _within(frames, states.shape[1]).to(states.dtype)
        if nemo.use_transf_encoder:
            states = nemo.transf_encoder(encoder_states=states, encoder_mask=mask)
        return states, mask

    def _asked(self, data: dict[str, Any]) -> Tensor:
        """Places of the decoder's output that carry loss [B, L - 1]; NeMo's models differ in whether it is also asked
        for the prompt."""
        places = data["tokens"].shape[1] - 1
        asked = _within(data["lengths"] - 1, places)
        return asked if self.asks_prompt else asked & ~_within(data["prompts"] - 1, places)

    def lengths(self, data: dict[str, Any]) -> Tensor:
        return self._asked(data).sum(1)

    def losses(self, encoded: Tensor, frames: Tensor, data: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        states, mask = self.states(encoded, frames)
        read, labels = data["tokens"][:, :-1], data["tokens"][:, 1:]
        hidden = self.nemo.transf_decoder(
            input_ids=read,
            decoder_mask=_within(data["lengths"] - 1, read.shape[1]).to(read.dtype),
            encoder_embeddings=states,
            encoder_mask=mask,
        )
        log_probs = self.nemo.log_softmax(hidden_states=hidden).float()
        return self.loss(log_probs=log_probs, labels=labels, output_mask=self._asked(data)).sum(1), {}

    def texts(self, encoded: Tensor, frames: Tensor, data: dict[str, Any]) -> list[str]:
        """Transcripts; rows whose prompts are of one length are searched together, as NeMo would take the padding of a
        shorter one for a part of it."""
        states, mask = self.states(encoded, frames)
        found = [""] * len(states)
        for length in data["prompts"].unique().tolist():
            rows = (data["prompts"] == length).nonzero()[:, 0]
            with self._search(length):
                hypotheses = self.nemo.decoding.decode_predictions_tensor(
                    encoder_hidden_states=states[rows],
                    encoder_input_mask=mask[rows],
                    decoder_input_ids=data["tokens"][rows, :length],
                )
            for row, text in zip(rows.tolist(), best_texts(hypotheses), strict=True):
                found[row] = text
        return found

    @contextmanager
    def _search(self, prompt: int) -> Iterator[None]:
        """Context of NeMo's search, which writes no more tokens than asked, and nothing by the rows that fill the
        output up to a multiple of 8, for which NeMo's tokenizer has a KeyError; beams keep to their own row. After it
        the decoder is in the mode that it was in: NeMo puts it into training mode, and dropout would be in the losses
        of what follows."""
        search = self.nemo.decoding.decoding
        search = getattr(search, "greedy_search", None) or search.beam_search
        search.max_seq_length = min(self.nemo.transf_decoder.max_sequence_length, prompt + self.most)
        if hasattr(search, "beam_size"):
            search._one_step_forward = partial(_own_memory, search._one_step_forward, search.beam_size, prompt)
        parts = [(part, part.training) for part in (self.nemo.transf_decoder, self.nemo.log_softmax)]
        real = int(self.nemo.tokenizer.vocab_size)
        hook = self.nemo.log_softmax.mlp.register_forward_hook(partial(_unfilled, real))
        try:
            yield
        finally:
            hook.remove()
            vars(search).pop("_one_step_forward", None)
            for part, training in parts:
                part.train(training)


def _unfilled(real: int, _module: Any, _inputs: Any, scores: Tensor) -> Tensor:
    """Scores [..., V] without the possibility of what is no token."""
    filled = torch.arange(scores.shape[-1], device=scores.device) >= real
    return scores.masked_fill(filled, -torch.inf)


def _own_memory(
    step: Callable[..., Any], beams: int, prompt: int, tokens: Tensor, states: Any, mask: Any, memory: Any, place: int
) -> Any:
    """A step of NeMo's beam search (tokens [B * beams, 1]) in which each beam remembers its own row's prompt. NeMo lays
    that memory out as [beams, B] and all else as [B, beams], so that the beams of a batch would go on from how other
    rows heard the prompt: a row's text would differ alone and in a batch."""
    if memory is not None and memory[0].shape[1] == prompt:  # the first step after the prompt
        memory = [layer.unflatten(0, (beams, -1)).transpose(0, 1).flatten(0, 1) for layer in memory]
    return step(tokens, states, mask, memory, place)


def _within(lengths: Tensor, width: int) -> Tensor:
    """Which of so many places are within the lengths [B]: [B, width]."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]
