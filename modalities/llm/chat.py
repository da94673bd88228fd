"""From conversations and texts to tokens with their loss mask.

A conversation is rendered once and tokenised once, without further special tokens: what the template writes is all
there is, so there is never a second BOS. A token carries loss if its first character lies in a trained span (see
`spans`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ...common.errors import BadExample, DataError
from . import marks
from .conversation import ArgumentStyle, Conversation, Text
from .spans import Deriver, Rendered
from .template import ChatTemplate
from .tokens import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Turns = Literal["all", "last"]
Control = Literal["refuse", "text", "token"]

_SURROGATE = re.compile(r"[\ud800-\udfff]")


class Chat:
    """Makes the tokens of conversations.

    Args:
        tokenizer: a fast one.
        template: its chat template.
        roles: roles whose messages carry loss; a message's own `train` comes first.
        turns: `all`, or `last`: only what is said after the last user's message.
        control: what becomes of a message that spells a control token, such as `<|im_end|>` in a user's text. `refuse`:
            a BadExample, so that it is counted; `text`: it is encoded as ordinary text; `token`: it becomes the token,
            for data in which it is meant. Never silently.
        keep_lost: whether messages without loss may be left out by the template (some leave out the system's).

    Raises:
        DataError: a tokenizer without offsets.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: ChatTemplate | None = None,
        *,
        roles: Collection[str] = ("assistant",),
        turns: Turns = "all",
        control: Control = "refuse",
        keep_lost: bool = False,
    ):
        needs_offsets(tokenizer)
        self.tokenizer, self.template = tokenizer, template or ChatTemplate(tokenizer)
        self.roles, self.turns, self.control, self.keep_lost = frozenset(roles), turns, control, keep_lost
        added = tokenizer.added_tokens_decoder
        self._added = frozenset(added)
        self._derive = Deriver(self.template, [str(token.content) for token in added.values()])
        special = sorted((str(t.content) for t in added.values() if t.special and t.content), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, special)) or "(?!)")

    # ------------------------------------------------------------------ which messages

    def wanted(self, conversation: Conversation) -> list[int]:
        """Numbers of the messages that carry loss."""
        said = conversation.messages
        asked = max((n for n, one in enumerate(said) if one.role == "user"), default=-1) if self.turns == "last" else -1
        by_rule = [one.role in self.roles and number > asked for number, one in enumerate(said)]
        return [n for n, one in enumerate(said) if (by_rule[n] if one.train is None else one.train)]

    # ------------------------------------------------------------------ tokens

    def encode(self, conversation: Conversation) -> Tokens:
        """The tokens of a conversation.

        Raises:
            BadExample: `no_target`, `control_token`, `reserved_character`, `not_unicode`, `message_lost`,
                `answer_lost`, `template_refused`, `template_failed`.
            DataError: the template's spans can't be derived; no row is at fault, so this ends the run.
        """
        wanted = self.wanted(conversation)
        if not wanted:
            raise BadExample("no_target", "no message carries loss", where=conversation.where, do="see task.roles")
        messages, rendered = self.render(conversation, wanted)
        if not any(rendered.spans.values()):
            raise BadExample("no_target", "the template's tags leave out every message", where=conversation.where)
        if rendered.lost and not self.keep_lost:
            raise BadExample(
                "message_lost",
                "the chat template leaves a message out",
                where=conversation.where,
                given=", ".join(f"{number} ({messages[number]['role']})" for number in rendered.lost),
                do="use a template that writes it, or allow it",
            )
        return self._tokens(conversation, messages, rendered)

    def render(self, conversation: Conversation, wanted: Sequence[int]) -> tuple[list[dict[str, Any]], Rendered]:
        """The messages as the template reads them, and the rendering with the spans of those `wanted`."""
        forced = [number for number in wanted if conversation.messages[number].train]
        context = (wanted, forced, conversation.tools, conversation.variables, conversation.where)
        messages = self._messages(conversation, "object")
        self._check_text(messages, conversation)
        try:
            return messages, self._derive(messages, *context)
        except BadExample as error:
            calls = any(one.tool_calls for one in conversation.messages)
            if error.reason != "template_failed" or not calls:
                raise
            messages = self._messages(conversation, "string")
            try:
                return messages, self._derive(messages, *context)
            except BadExample:
                raise error from None

    @staticmethod
    def _messages(conversation: Conversation, style: ArgumentStyle) -> list[dict[str, Any]]:
        return [one.as_dict(style) for one in conversation.messages]

    def _check_text(self, messages: Sequence[Mapping[str, Any]], conversation: Conversation) -> None:
        where = conversation.where
        for text in strings([messages, conversation.tools]):
            if _SURROGATE.search(text):
                raise BadExample("not_unicode", "a text holds half of a character", where=where, given=ascii(text))
            if marks.is_reserved(text):
                problem = "a text holds a private-use character of planes 15 or 16 that is needed here"
                raise BadExample("reserved_character", problem, where=where, do="remove it")
        found = next((hit for text in strings(_said(messages)) for hit in self._control.finditer(text)), None)
        if found is not None and self.control == "refuse":
            raise BadExample(
                "control_token",
                "a message spells a control token, which the model would read as one",
                where=where,
                given=found.group(),
                do="correct the row, or set how control tokens in messages are taken: as text, or as tokens",
            )

    def _tokens(self, conversation: Conversation, messages: Sequence[Mapping[str, Any]], rendered: Rendered) -> Tokens:
        breaks = self.breaks(conversation, messages, rendered.text) if self.control == "text" else []
        ids, starts = encode_text(self.tokenizer, rendered.text, breaks)
        trained = np.zeros(len(ids), dtype=bool)
        ends = set()
        for number, parts in rendered.spans.items():
            inside = np.zeros(len(ids), dtype=bool)
            for begin, end in parts:
                inside |= (starts >= begin) & (starts < end)
            if not inside.any():
                raise BadExample("no_target", f"message {number} has no token of its own", where=conversation.where)
            trained |= inside
            last = int(ids[np.flatnonzero(inside)[-1]])
            ends |= {last} & self._added
        cuttable = np.zeros(len(ids), dtype=bool)
        for number, (begin, end) in rendered.contents.items():
            if messages[number]["role"] != "system":
                cuttable |= (starts >= begin) & (starts < end)
        self._check_begin(ids)
        return Tokens(ids, trained, cuttable & ~trained, frozenset(ends), len(rendered.lost))

    def breaks(
        self, conversation: Conversation, messages: Sequence[Mapping[str, Any]], text: str, prompt: bool = False
    ) -> list[int]:
        """Places inside the control tokens that messages spell; cut there, they stay text.

        Args:
            conversation: its tools and variables.
            messages: as the template reads them.
            text: their rendering.
            prompt: whether it has the start of an assistant's turn at its end.
        """
        sign = chr(0x100000)

        def broken(value: Any) -> Any:
            if isinstance(value, str):
                return self._control.sub(lambda hit: hit.group()[:1] + sign + hit.group()[1:], value)
            if isinstance(value, Mapping):
                return {key: broken(item) for key, item in value.items()}
            return [broken(item) for item in value] if isinstance(value, list | tuple) else value

        if not any(self._control.search(part) for part in strings(_said(messages))):
            return []
        signed = [{**broken(one), "role": one["role"]} for one in messages]
        where = conversation.where
        found = self.template.render(signed, conversation.tools, conversation.variables, prompt, where)
        cut = marks.read(found)
        if cut.text != text:
            raise BadExample(
                "control_token",
                "a message spells a control token, and the template looks at it",
                where=conversation.where,
                do="correct the row",
            )
        return [place for place, _ in cut.every]

    def _check_begin(self, ids: np.ndarray) -> None:
        bos = self.tokenizer.bos_token_id
        if bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
            raise DataError(
                "the chat template writes BOS twice", where="chat template", given=self.template.line((), 1)
            )

    # ------------------------------------------------------------------ prompts

    def prompt(self, conversation: Conversation) -> tuple[np.ndarray, str] | None:
        """What a model is given to say the last assistant's message anew, ids [T], and what it should say: the
        message's content; of one that calls tools, what the template makes of it. None if nothing precedes it.

        Raises:
            BadExample: `prompt_differs`: the template asks for an answer with another text than training has before
                it, so the model would be asked in a way that it was not trained on; and those of `encode`.
        """
        last = max((number for number, one in enumerate(conversation.messages) if one.role == "assistant"), default=0)
        if last == 0:
            return None
        until = replace(conversation, messages=conversation.messages[: last + 1])
        messages, rendered = self.render(until, [last])
        asked = self.template.render(messages[:last], until.tools, until.variables, prompt=True, where=until.where)
        if not rendered.text.startswith(asked):
            raise BadExample(
                "prompt_differs",
                "the chat template's prompt is not the text that training has before the answer",
                where=until.where,
                given=f"... {asked[-60:]!r}",
                expected=f"... {rendered.text[max(0, len(asked) - 60) : len(asked)]!r}",
                do="use a chat template that writes both alike, or put what it adds, such as reasoning, into the rows",
            )
        breaks = self.breaks(until, messages, rendered.text) if self.control == "text" else []
        ids, _ = encode_text(self.tokenizer, asked, [place for place in breaks if place < len(asked)])
        self._check_begin(ids)
        answer = conversation.messages[last]
        if not answer.tool_calls:
            return ids, answer.content or ""
        wanted, _ = encode_text(self.tokenizer, rendered.text[len(asked) :])
        return ids, str(self.tokenizer.decode(wanted, skip_special_tokens=True)).strip()

    def asked(self, conversation: Conversation) -> np.ndarray:
        """Ids [T] of a conversation and of the begin of an assistant's turn, for a model to go on with.

        Raises:
            BadExample: `control_token`, `reserved_character`, `not_unicode`, `template_refused`, `template_failed`.
        """
        messages = self._messages(conversation, "object")
        self._check_text(messages, conversation)
        text = self.template.render(messages, conversation.tools, conversation.variables, True, conversation.where)
        breaks = self.breaks(conversation, messages, text, prompt=True) if self.control == "text" else []
        ids, _ = encode_text(self.tokenizer, text, breaks)
        self._check_begin(ids)
        return ids

    # ------------------------------------------------------------------ ends

    def terminators(self) -> tuple[int, ...]:
        """Ids of all tokens at which generation is to stop: those that end an assistant's turn, and EOS.

        Found on small conversations: an answer at the end and in the middle, and a tool call. Turns of other forms may
        have others: `Tokens.ends` has those of each example.
        """
        user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        call = {"type": "function", "id": "a00000000", "function": {"name": "c", "arguments": {"d": "e"}}}
        calling = {"role": "assistant", "tool_calls": [call]}
        ends = {self.tokenizer.eos_token_id} - {None}
        small: list[list[dict[str, Any]]] = [[user, answer], [user, answer, user, answer], [user, calling]]
        for messages in small:
            try:
                found = self._derive(messages, [1])
            except DataError:
                continue
            for _, end in found.spans.get(1, [])[-1:]:
                ids, starts = encode_text(self.tokenizer, found.text, [])
                ends |= {int(ids[starts < end][-1])} & self._added
        return tuple(sorted(ends))


def _said(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in one.items() if key != "role"} for one in messages]


def strings(value: Any) -> Iterator[str]:
    """All strings within lists and objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)


def needs_offsets(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that can't say where its tokens stand in the text.

    Raises:
        DataError: a slow tokenizer.
    """
    if not tokenizer.is_fast:
        raise DataError(
            "the tokenizer gives no offsets, without which the loss mask can't be made",
            where="model.path",
            given=type(tokenizer).__name__,
            expected="a fast tokenizer (tokenizer.json)",
            do="convert it: AutoTokenizer.from_pretrained(path, use_fast=True).save_pretrained(path)",
        )


def encode_text(
    tokenizer: PreTrainedTokenizerBase, text: str, breaks: Sequence[int] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Ids of a text, and the characters at which they begin, both [T] int64; without any special token added.

    Args:
        breaks: places that no token crosses.
    """
    ids, starts = [], []
    for begin, end in pairwise([0, *breaks, len(text)]):
        numbers, offsets, lead = _piece(tokenizer, text[begin:end], begin > 0)
        bounds = np.array(offsets, dtype=np.int64).reshape(-1, 2)
        # A token begins where the one before ends: some tokenizers' offsets leave out the space that it begins with.
        # Tokens that share a character (the bytes of one letter) begin where it does.
        before = np.maximum.accumulate(np.concatenate([[lead], bounds[:, 1]]))[:-1]
        ids.append(np.array(numbers, dtype=np.int64))
        starts.append(begin + np.maximum(0, np.minimum(bounds[:, 0], before) - lead))
    return np.concatenate(ids), np.concatenate(starts)


def _piece(
    tokenizer: PreTrainedTokenizerBase, piece: str, is_inner: bool
) -> tuple[list[int], list[tuple[int, int]], int]:
    """Ids and offsets of a piece, and the length of what was put before it: an inner piece is encoded after a newline,
    so that SentencePiece does not begin it with a space of its own."""
    options: dict[str, Any] = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
    if is_inner:
        found = tokenizer("\n" + piece, **options)
        newline = len(tokenizer("\n", add_special_tokens=False).input_ids)
        if all(stop <= 1 for _, stop in found["offset_mapping"][:newline]):
            return found["input_ids"][newline:], found["offset_mapping"][newline:], 1
    found = tokenizer(piece, **options)
    return found["input_ids"], found["offset_mapping"], 0


def encode_plain(tokenizer: PreTrainedTokenizerBase, text: Text) -> Tokens:
    """The tokens of a text: BOS if the tokenizer writes one, the prompt, the text, EOS; the last two carry loss.

    Prompt and text are tokenised as one, as the model would meet them.

    Raises:
        BadExample: `no_target`.
        DataError: a slow tokenizer; one without EOS.
    """
    needs_offsets(tokenizer)
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no EOS", where="model.path", do="set its eos_token")
    prompt = text.prompt or ""
    ids, starts = encode_text(tokenizer, prompt + text.text)
    trained = starts >= len(prompt)
    if not trained.any():
        raise BadExample("no_target", "the text has no token of its own", where=text.where)
    bos = begin_of_text(tokenizer)
    edge = (len(bos), 1)
    ids = np.concatenate([bos, ids, [tokenizer.eos_token_id]]).astype(np.int64)
    cuttable = np.pad(~trained, edge)
    trained = np.pad(trained, edge)
    trained[-1] = True
    return Tokens(ids, trained, cuttable, frozenset({int(tokenizer.eos_token_id)}))


def plain_prompt(tokenizer: PreTrainedTokenizerBase, text: Text) -> np.ndarray:
    """[T] ids of what precedes a text: BOS if the tokenizer writes one, and the prompt."""
    ids, _ = encode_text(tokenizer, text.prompt or "")
    return np.concatenate([begin_of_text(tokenizer), ids]).astype(np.int64)


def begin_of_text(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """[BOS] if the tokenizer begins a text with it, else []."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and list(tokenizer("a").input_ids[:1]) == [bos] else []
