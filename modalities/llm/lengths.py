"""What becomes of an example that is too long: a policy for each side, and everything that is cut is counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from ...common.errors import BadExample
from .conversation import Conversation
from .tokens import Tokens

if TYPE_CHECKING:
    from .chat import Chat


@dataclass(frozen=True)
class Limit:
    """How long an example may be, and how a longer one is cut.

    A conversation first loses whole exchanges, the oldest first: what stays is well formed and was really said, while a
    cut inside of a turn shows the model turns that begin or stop anywhere. Then the sides of what is left are cut.

    Args:
        max_length: most tokens.
        turns: `drop` the oldest exchanges of a conversation, or `keep` all.
        prompt: the side at which what users, tools and documents say is cut: `left` (the question usually stands at the
            end) or `right`; `keep`: it is not. The system's message, BOS and what the template writes are never cut.
        answer: `right`: the answer loses its end, and with it its end token, so the model doesn't learn to stop
            there; `keep`: an example whose answer does not fit is refused.
        prompt_share: share of `max_length` below which the prompt is not cut if the answer can be cut instead.
    """

    max_length: int
    turns: Literal["drop", "keep"] = "drop"
    prompt: Literal["left", "right", "keep"] = "left"
    answer: Literal["right", "keep"] = "keep"
    prompt_share: float = 0.5

    def __post_init__(self) -> None:
        if self.max_length < 1 or not 0 <= self.prompt_share < 1:
            raise ValueError("max_length must be at least 1, prompt_share in [0, 1)")


@dataclass(frozen=True)
class Cut:
    """What was cut from an example.

    Args:
        exchanges: whole exchanges dropped.
        messages: messages in them.
        prompt: tokens of the prompt.
        answer: tokens from the first that carries loss on.
        tail: tokens after the last one that carries loss, which teach nothing.
    """

    exchanges: int = 0
    messages: int = 0
    prompt: int = 0
    answer: int = 0
    tail: int = 0

    def __bool__(self) -> bool:
        return any((self.exchanges, self.prompt, self.answer, self.tail))

    @property
    def tokens(self) -> int:
        """Tokens cut from what was left of the conversation."""
        return self.prompt + self.answer + self.tail


def cut(tokens: Tokens, limit: Limit, where: str | None = None) -> tuple[Tokens, Cut]:
    """The tokens within the limit, and what was cut: `len(given) == len(kept) + cut.tokens`.

    Raises:
        BadExample: `no_target` if no token carries loss, `too_long` if the policy does not let it fit.
    """
    places = np.flatnonzero(tokens.trained)
    if len(places) == 0:
        raise BadExample("no_target", "no token carries loss", where=where)
    excess = len(tokens) - limit.max_length
    if excess <= 0:
        return tokens, Cut()
    first, last = int(places[0]), int(places[-1])
    tail = min(excess, len(tokens) - 1 - last)
    prompt, answer = _shares(tokens, limit, first, excess - tail)
    kept = np.ones(len(tokens), dtype=bool)
    removable = np.flatnonzero(tokens.cuttable[:first])
    kept[removable[:prompt] if limit.prompt == "left" else removable[len(removable) - prompt :]] = False
    kept[len(tokens) - tail - answer :] = False
    found = tokens.at(kept)
    if len(found) > limit.max_length or not found.trained.any():
        raise BadExample(
            "too_long",
            "the example is longer than the limit, and the policy does not let it be cut to fit",
            where=where,
            given=f"{len(tokens)} tokens, {last + 1 - first} of them from the answer's begin on",
            expected=f"at most {limit.max_length}",
            do="raise the maximum length, or allow the answer to be cut",
        )
    return found, Cut(prompt=prompt, answer=answer, tail=tail)


def _shares(tokens: Tokens, limit: Limit, first: int, excess: int) -> tuple[int, int]:
    """Tokens to take from the prompt and from the answer."""
    removable = int(tokens.cuttable[:first].sum()) if limit.prompt != "keep" else 0
    if limit.answer == "keep":
        return min(removable, excess), 0
    floor = int(limit.max_length * limit.prompt_share)  # the prompt keeps this many, if it has them
    spare = min(removable, max(0, first - floor), excess)
    answer = min(excess - spare, int(np.flatnonzero(tokens.trained)[-1]) - first)  # one token stays at least
    return min(removable, excess - answer), answer


def fit(conversation: Conversation, chat: Chat, limit: Limit) -> tuple[Conversation, Tokens, Cut]:
    """A conversation and its tokens within the limit: as few of the oldest exchanges as needed are dropped, then, if
    the last one that carries loss is too long alone, its sides are cut.

    Raises:
        BadExample: of `Chat.encode` and `cut`.
    """
    options = shortened(conversation, chat.wanted(conversation)) if limit.turns == "drop" else [conversation]
    encoded = {0: chat.encode(conversation)}

    def fits(number: int) -> bool:
        if number not in encoded:
            encoded[number] = chat.encode(options[number])
        return len(encoded[number]) <= limit.max_length

    chosen = 0 if fits(0) else len(options) - 1
    too_few = 0
    if chosen and fits(chosen):
        while chosen - too_few > 1:
            middle = (too_few + chosen) // 2
            too_few, chosen = (too_few, middle) if fits(middle) else (middle, chosen)
    tokens, taken = cut(encoded[chosen], limit, conversation.where)
    dropped = len(conversation.messages) - len(options[chosen].messages)
    return options[chosen], tokens, replace(taken, exchanges=chosen, messages=dropped)


def shortened(conversation: Conversation, wanted: Sequence[int]) -> list[Conversation]:
    """The conversation without its first 0, 1, 2, ... exchanges, as far as a message with loss is left.

    An exchange goes from a user's message to the next one; the system's messages at the begin stay.
    """
    said = conversation.messages
    head = next((n for n, one in enumerate(said) if one.role != "system"), len(said))
    last = max(wanted, default=-1)
    begins = [n for n, one in enumerate(said) if one.role == "user" and head < n <= last]
    return [conversation, *(replace(conversation, messages=(*said[:head], *said[begin:])) for begin in begins)]
