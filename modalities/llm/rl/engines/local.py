"""The engine in the trainer's own process: transformers' model as it is trained.

A prompt is computed once for all of its completions, which begin with copies of its keys and values; completions that
have ended leave the batch, and their keys and values with them, as soon as there are enough of them: each time costs a
copy of what stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import signature
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ...model import Head
from .cache import with_room
from .choice import choose
from .engine import Completion, Sampling, Weights

FULL = 0.75
"""Least share of a batch whose completions go on."""


class LocalEngine:
    """Draws completions with a model in memory, in the modes and the precision that the caller has set.

    Args:
        causal: the transformers model.
        head: its output layer.
        batch: most completions that are drawn at a time; the keys and values of so many have to fit into memory.
    """

    gathers: Literal["nothing", "first", "every"] = "nothing"

    def __init__(self, causal: Any, head: Head, batch: int):
        self.causal, self.head, self.batch, self.version = causal, head, batch, 0
        known = signature(causal.get_decoder().forward).parameters
        self._cache = "cache" if "cache" in known else "past_key_values"  # its name before transformers 5.24

    def update(self, version: int, weights: Weights) -> None:
        """The weights are the trainer's own; only their name changes."""
        self.version = version

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seeds: Sequence[Sequence[int]]
    ) -> list[list[Completion]]:
        found: list[list[Completion]] = [[] for _ in prompts]
        for part in parts(prompts, seeds, self.batch):
            rows = [(number, seed) for number, of in part for seed in of]
            made = self._together([prompts[number] for number, _ in part], [len(of) for _, of in part], rows, sampling)
            for (number, _), completion in zip(rows, made, strict=True):
                found[number].append(completion)
        return found

    def _together(
        self, prompts: list[np.ndarray], repeats: list[int], rows: list[tuple[int, int]], sampling: Sampling
    ) -> list[Completion]:
        """Completions of prompts, each as often as `repeats` says; of the seeds in `rows`."""
        device = self.causal.device
        ids, seen = _padded(prompts)
        mask = None if seen.all() else seen.to(device)
        hidden, cache = self._decoded(ids.to(device), mask, _positions(seen).to(device), None)
        with_room(cache)
        copies = torch.repeat_interleave(torch.tensor(repeats)).to(device)
        cache.batch_select_indices(copies)
        lasts = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)[copies]
        state = _Rows(hidden[copies], mask if mask is None else mask[copies], lasts)
        limits = self._limits(prompts, sampling)[copies.cpu()].to(device)
        longest = int(limits.max())
        random = torch.from_numpy(np.stack([_stream(seed, longest) for _, seed in rows])).to(device)
        tokens = torch.zeros(len(rows), longest, dtype=torch.int64, device=device)
        log_probs = torch.zeros(len(rows), longest, device=device)
        counts = torch.zeros(len(rows), dtype=torch.int64, device=device)
        ended = torch.zeros(len(rows), dtype=torch.bool, device=device)
        stops, active = torch.tensor(sampling.stops, device=device), torch.arange(len(rows), device=device)
        going = torch.ones_like(ended)
        for step in range(longest):
            drawn, values = choose(self.head.logits(state.hidden), random[active, step], sampling)
            tokens[active, step], log_probs[active, step] = drawn, values.float()  # after its end, never read
            stopped = torch.isin(drawn, stops)
            last = going & (stopped | (limits[active] == step + 1))
            ended[active[last]], counts[active[last]] = stopped[last], step + 1
            going &= ~last
            left = int(going.sum())
            if not left:
                break
            if left < FULL * len(active):
                kept = going.nonzero()[:, 0]
                active, drawn, state, going = active[kept], drawn[kept], state.at(kept), going[kept]
                cache.batch_select_indices(kept)
            state = state.followed(going)
            state.hidden, cache = self._decoded(drawn[:, None], state.mask, state.places[:, None], cache)
        columns = tokens.int().cpu().numpy(), log_probs.cpu().numpy(), counts.tolist(), ended.tolist()
        return [
            Completion(ids[:count].copy(), each[:count].copy(), finished, self.version)
            for ids, each, count, finished in zip(*columns, strict=True)
        ]

    def _decoded(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """([B, D] last hidden state of each row, the keys and values)."""
        known = {} if cache is None else {self._cache: cache}
        out = self.causal.get_decoder()(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **known
        )
        return out.last_hidden_state[:, -1], out[self._cache]

    def _limits(self, prompts: list[np.ndarray], sampling: Sampling) -> Tensor:
        """[P] most new tokens of each prompt that the model has positions for; the last one needs none."""
        positions = getattr(self.causal.config.get_text_config(), "max_position_embeddings", None)
        rooms = [
            sampling.max_new_tokens if positions is None else max(1, positions - len(prompt) + 1) for prompt in prompts
        ]
        return torch.tensor(rooms).clamp(max=sampling.max_new_tokens)


def parts(
    prompts: Sequence[np.ndarray], seeds: Sequence[Sequence[int]], most: int
) -> Iterator[list[tuple[int, Sequence[int]]]]:
    """Prompts, by number, with seeds that are completed together, at most so many, those of similar lengths; a prompt
    with more completions than fit comes several times."""
    part: list[tuple[int, Sequence[int]]] = []
    room = most
    for number in sorted(range(len(prompts)), key=lambda one: len(prompts[one])):
        left = seeds[number]
        while len(left):
            if room == 0 or (part and room < len(left) <= most):
                yield part
                part, room = [], most
            part.append((number, left[:room]))
            left, room = left[room:], room - len(part[-1][1])
    if part:
        yield part


class _Rows:
    """Where the rows of a batch stand.

    Args:
        hidden: [B, D] last hidden states, from which the next tokens are drawn.
        mask: [B, K] what of the keys is a token and no padding; None: all.
        places: [B] position of the last token.
    """

    def __init__(self, hidden: Tensor, mask: Tensor | None, places: Tensor):
        self.hidden, self.mask, self.places = hidden, mask, places

    def at(self, kept: Tensor) -> _Rows:
        """Some of the rows."""
        mask = None if self.mask is None else self.mask[kept]
        return _Rows(self.hidden[kept], mask, self.places[kept])

    def followed(self, going: Tensor) -> _Rows:
        """The rows with one token more; those that don't go on [B] stay at a position that the model has."""
        places = self.places + going
        if self.mask is None:
            return _Rows(self.hidden, None, places)
        one = self.mask.new_ones(len(self.mask), 1)
        return _Rows(self.hidden, torch.cat([self.mask, one], dim=1), places)


def _padded(prompts: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """([P, T] ids padded at the left, [P, T] what is no padding)."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    seen = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        seen[row, longest - len(prompt) :] = 1
    return ids, seen


def _positions(seen: Tensor) -> Tensor:
    return (seen.cumsum(dim=1) - 1).clamp(min=0)


def _stream(seed: int, number: int) -> np.ndarray:
    """The first random numbers in [0, 1) of a completion."""
    return np.random.default_rng(seed).random(number, dtype=np.float32)
