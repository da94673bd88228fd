"""From turns to tokens: what the policy wrote stays as it was sampled, what stands between is the template's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .....common.errors import DataError
from ... import marks
from ...chat import Chat, encode_text
from ...conversation import Conversation, Message


@dataclass
class Transcript:
    """The tokens of an episode, which only grow.

    Args:
        ids: all tokens, as the policy saw them.
        written: of each, whether the policy wrote it; only such tokens carry loss.
        log_probs: of each that the policy wrote, in nats, as the engine gave it; 0 of the others.
    """

    ids: list[int] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def prompt(self) -> int:
        """Tokens before the policy's first turn."""
        return self.written.index(True) if True in self.written else len(self.ids)

    def after_prompt(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of the T tokens after the prompt: [T] int32 ids, [T] bool which the policy wrote, [T] float32
        log-probabilities of these, 0 of the others."""
        begin = self.prompt
        return (
            np.array(self.ids[begin:], np.int32),
            np.array(self.written[begin:], bool),
            np.array(self.log_probs[begin:], np.float32),
        )

    def read(self, ids: Sequence[int]) -> None:
        """Add tokens that the policy is given."""
        self._add(ids, [0.0] * len(ids), False)

    def write(self, ids: Sequence[int], log_probs: Sequence[float]) -> None:
        """Add tokens that the policy sampled."""
        if len(ids) != len(log_probs):
            raise ValueError(f"{len(log_probs)} log-probabilities of {len(ids)} tokens")
        self._add(ids, log_probs, True)

    def _add(self, ids: Sequence[int], log_probs: Sequence[float], written: bool) -> None:
        self.ids += [int(one) for one in ids]
        self.written += [written] * len(ids)
        self.log_probs += [float(one) for one in log_probs]


class Turns:
    """Writes the turns of a conversation as tokens.

    Rendering the whole conversation anew after each turn would give other tokens than the policy sampled: its text may
    be tokenised otherwise, and some templates leave out what it thought. So only what follows a turn is taken from the
    template: the rendering of the turn and the messages after it, from the turn's end on. The policy is trained on
    exactly what it saw.

    Args:
        chat: template and tokenizer. Control tokens that messages spell, such as a tool's output, stay text.
        tools: JSON schemas.
        variables: of the template.
    """

    def __init__(self, chat: Chat, tools: Sequence[Mapping[str, Any]] = (), variables: Mapping[str, Any] | None = None):
        self.chat, self.tools, self.variables = chat, tuple(tools), dict(variables or {})

    def begin(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt: tokens of the messages and of the start of the policy's turn.

        Raises:
            DataError: the template refuses them.
        """
        text, breaks = self._rendered(messages)
        return _ids(encode_text(self.chat.tokenizer, text, breaks)[0])

    def between(self, messages: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]], last: int) -> list[int]:
        """The tokens from the end of a turn of the policy to the start of its next.

        Args:
            messages: all that was said before the turn.
            new: what was said after it.
            last: id of the turn's last token; if the template ends turns with it, it is not written again.

        Raises:
            DataError: the template refuses the messages, or does not write the turn.
        """
        turn = {"role": "assistant", "content": marks.PROBE}
        text, breaks = self._rendered([*messages, turn, *new])
        place = text.rfind(marks.PROBE)
        if place < 0:
            problem = "the chat template leaves an assistant's turn out, so what follows it can't be told"
            raise DataError(problem, where="chat template", do="use another chat template")
        begin = place + len(marks.PROBE)
        # After a newline, which is taken away again: else SentencePiece would begin the piece with a space of its own.
        inner = [1, *(one - begin + 1 for one in breaks if one > begin)]
        found, starts = encode_text(self.chat.tokenizer, "\n" + text[begin:], inner)
        ids = _ids(found[starts >= 1])
        return ids[1:] if ids[:1] == [last] else ids

    def _rendered(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[int]]:
        """The text up to the start of the policy's turn, and where control tokens in messages are to be cut."""
        said = [dict(one) for one in messages]
        text = self.chat.template.render(said, self.tools, self.variables, prompt=True, where="an episode")
        whole = Conversation((Message("user", ""),), "an episode", tools=self.tools, variables=self.variables)
        return text, self.chat.breaks(whole, said, text, prompt=True)


def _ids(found: np.ndarray) -> list[int]:
    return [int(one) for one in found]
