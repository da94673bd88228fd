"""Answers to one prompt as tokens: cut alike, so that they keep their prompt in common."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ...common.errors import BadExample
from .conversation import Conversation, Text
from .lengths import Cut, Limit
from .preferences import Preference
from .tokens import Tokens

Item = Conversation | Text


def fit_together(item: Preference, encode: Callable[[Item], Tokens], limit: Limit) -> tuple[list[Tokens], Cut]:
    """The tokens of each answer with its prompt, none longer than the limit.

    The prompt is cut first: its oldest exchanges, then its left or right side; answers only if the policy allows it.

    Args:
        item: the answers.
        encode: gives the tokens of one with its prompt.
        limit: most tokens of a prompt with one answer.

    Returns:
        the tokens, best answer first, and what was cut; `answer` is the sum over all of them.

    Raises:
        BadExample: `too_long`, `no_target`, and those of `encode`.
    """
    drops = _drops(item) if limit.turns == "drop" else [0]
    encoded: dict[int, list[Tokens]] = {}

    def fits(number: int) -> bool:
        if number not in encoded:
            encoded[number] = [encode(_without(one, drops[number])) for one in item.answers]
        return max(map(len, encoded[number])) <= limit.max_length

    fits(0)  # most do
    chosen = min(bisect_left(range(len(drops)), True, key=fits), len(drops) - 1)
    fits(chosen)
    dropped = len(_messages(item.answers[0])) - len(_messages(_without(item.answers[0], drops[chosen])))
    found, taken = _sides(encoded[chosen], limit, item.where)
    return found, replace(taken, exchanges=chosen, messages=dropped)


def _messages(one: Item) -> Sequence[object]:
    return one.messages if isinstance(one, Conversation) else ()


def _drops(item: Preference) -> list[int]:
    """Message numbers from which on the prompt may be kept: 0, and each user's message but the first."""
    first = item.answers[0]
    if isinstance(first, Text):
        return [0]
    head = _head(first)
    return [0, *(n for n, one in enumerate(first.messages[: item.prompt]) if one.role == "user" and n > head)]


def _head(one: Conversation) -> int:
    """Messages of the system at the begin."""
    return next((n for n, said in enumerate(one.messages) if said.role != "system"), len(one.messages))


def _without(one: Item, begin: int) -> Item:
    if begin == 0 or isinstance(one, Text):
        return one
    return replace(one, messages=(*one.messages[: _head(one)], *one.messages[begin:]))


def _sides(tokens: Sequence[Tokens], limit: Limit, where: str) -> tuple[list[Tokens], Cut]:
    """Cut the same tokens of what all begin with, then, if that is allowed, the answers' ends."""
    excess = max(map(len, tokens)) - limit.max_length
    prompt = answer = 0
    if excess > 0:
        reach = 0 if limit.prompt == "keep" else _shared(tokens)
        removable = np.flatnonzero(tokens[0].cuttable[:reach])
        prompt = min(len(removable), excess)
        gone = removable[:prompt] if limit.prompt == "left" else removable[len(removable) - prompt :]
        tokens = [one.at(np.delete(np.arange(len(one)), gone)) for one in tokens]
    if limit.answer == "right":
        answer = sum(max(0, len(one) - limit.max_length) for one in tokens)
        tokens = [one.at(np.arange(min(len(one), limit.max_length))) for one in tokens]
    longest = max(map(len, tokens))
    if longest > limit.max_length or (answer and any(not one.trained[1:].any() for one in tokens)):
        raise BadExample(
            "too_long",
            "the example is longer than the limit, and the policy does not let it be cut to fit",
            where=where,
            given=f"{longest + answer} tokens of the prompt that can't be cut and an answer",
            expected=f"at most {limit.max_length}",
            do="raise the maximum length, or allow answers to be cut",
        )
    if any(not one.trained[1:].any() for one in tokens):
        raise BadExample("no_target", "no token of an answer is left to be predicted", where=where)
    return list(tokens), Cut(prompt=prompt, answer=answer)


def _shared(tokens: Sequence[Tokens]) -> int:
    """Tokens with which all begin, up to the first that carries loss in any."""
    first, most = tokens[0], min(int(np.argmax(one.trained)) for one in tokens)
    for other in tokens[1:]:
        same = (first.ids[:most] == other.ids[:most]) & (first.cuttable[:most] == other.cuttable[:most])
        most = most if same.all() else int(np.argmin(same))
    return most
