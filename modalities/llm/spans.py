"""Where each trained message stands in the one rendering of a conversation, for any chat template.

A trained span begins where generation begins, after what `add_generation_prompt` writes, and ends with the turn's end
token. Generation tags in the template say it; without them it is derived, always as places in the full rendering:

- Marks (see `marks`) show where each message's strings went, whatever the template trimmed, moved or dropped.
- Begin: the text between the last message before and the assistant's turn, as the template writes it in a prompt that
  stops there, must stand at the same place in the full rendering. Where it does not (a prompt that forces an opening
  thought, which the template leaves out of history), what precedes the content whatever the content is must be its
  begin.
- End: what the template writes after the message whatever follows (nothing, a prompt, a user), up to its last token
  that is an added one.

What this leaves open is refused, with the template's line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...common.errors import BadExample, DataError
from . import marks
from .template import ChatTemplate

Span = tuple[int, int]


@dataclass(frozen=True)
class Rendered:
    """A conversation's text.

    Args:
        text: the one rendering, that is tokenised.
        spans: characters [start, end) that carry loss, by message; several where tags say so.
        contents: characters of the messages' contents, where they stand as they were given.
        lost: messages whose text the template leaves out.
    """

    text: str
    spans: Mapping[int, list[Span]]
    contents: Mapping[int, Span]
    lost: tuple[int, ...]


@dataclass
class Deriver:
    """Finds the spans of conversations.

    Args:
        template: the chat template.
        added: the tokenizer's added tokens, among which the end of a turn must be.
    """

    template: ChatTemplate
    added: Sequence[str]
    _closings: dict[tuple[str, bool, str | None], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        longest_first = sorted(filter(None, self.added), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        wanted: Iterable[int],
        forced: Iterable[int] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        where: str | None = None,
    ) -> Rendered:
        """Render a conversation and find the spans of the messages `wanted`.

        Args:
            messages: as `Message.as_dict` gives them.
            wanted: numbers of the messages that carry loss.
            forced: those of them that do so although the template's tags leave them out.
            tools: schemas.
            variables: of this conversation.
            where: place of the row.

        Raises:
            BadExample: the template refuses the conversation, or leaves the answer out.
            DataError: the spans can't be derived.
        """
        return _Derivation(self, messages, tools, variables or {}, where).run(list(wanted), set(forced))

    def closing(self, text: str) -> str:
        """A text up to its last added token; empty without one."""
        found = list(self._added.finditer(text))
        return text[: found[-1].end()] if found else ""

    def first(self, gap: str) -> str:
        """A text up to its first added token, if only space precedes it; else empty."""
        found = self._added.match(gap, len(gap) - len(gap.lstrip()))
        return gap[: found.end()] if found else ""

    def is_filling(self, text: str) -> bool:
        """Whether a text holds only space and added tokens."""
        return not self._added.sub("", text).strip()


@dataclass
class _Derivation:
    """The work on one conversation."""

    parent: Deriver
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    where: str | None

    def run(self, wanted: list[int], forced: set[int]) -> Rendered:
        text, tags = self.plain()
        self.seen = self.marked(text, wanted)
        by_message = self.by_message(tags)
        spans: dict[int, list[Span]] = {}
        for number in wanted:
            if number not in self.seen.lasts:
                self.refuse_lost(number)
            if number in by_message:
                spans[number] = self.with_end(number, by_message[number])
            elif not self.parent.template.has_tags or number in forced:
                spans[number] = [(self.begin(number), self.end(number))]
        self.verify(spans)
        return Rendered(text, spans, self.contents(), self.lost())

    # ------------------------------------------------------------------ renderings

    def plain(self) -> tuple[str, list[Span]]:
        template = self.parent.template
        if template.has_tags:
            return template.tagged(self.messages, self.tools, self.variables, self.where)
        return template.render(self.messages, self.tools, self.variables, where=self.where), []

    def render(self, messages: Sequence[Mapping[str, Any]], prompt: bool = False) -> marks.Marked | None:
        """A rendering without its marks; None if the template refuses it."""
        try:
            text = self.parent.template.render(messages, self.tools, self.variables, prompt, self.where)
        except BadExample:
            return None
        return marks.read(text)

    def marked(self, text: str, wanted: list[int]) -> marks.Marked:
        """The rendering's marks, of as many messages as can bear them."""
        self.signed = marks.mark(self.messages, range(len(self.messages)))
        whole = self.render(self.signed)
        if whole is not None and whole.text == text:
            return whole
        found: dict[int, dict[str, Any]] = {}
        for number in range(len(self.messages)):
            for thorough in (True, False):
                signed = marks.mark(self.messages, [number], thorough)
                one = self.render(signed)
                if one is not None and one.text == text:
                    found[number] = signed[number]
                    break
        self.signed = [found.get(number, dict(one)) for number, one in enumerate(self.messages)]
        whole = self.render(self.signed)
        if whole is None or whole.text != text:
            raise self.refusal("its text changes with signs in the messages", wanted[0] if wanted else 0)
        return whole

    def by_message(self, tags: list[Span]) -> dict[int, list[Span]]:
        """The tags' spans by the message whose text they hold; one without text goes with the one after it."""
        found: dict[int, list[Span]] = {}
        waiting: list[Span] = []
        for begin, end in tags:
            waiting.append((begin, end))
            inside = {number for place, number in self.seen.every if begin <= place <= end}
            inside = {number for number in inside if begin < self.seen.lasts[number] or len(inside) == 1}
            if len(inside) > 1:
                raise self.refusal(f"one generation tag holds the messages {sorted(inside)}", min(inside))
            for number in inside:
                found.setdefault(number, []).extend(waiting)
                waiting = []
        return found

    # ------------------------------------------------------------------ one message

    def begin(self, number: int) -> int:
        """Where generation of a message begins."""
        anchor = max((other for other in self.seen.lasts if other < number), default=None)
        place = self.seen.lasts[anchor] if anchor is not None else 0
        actual = self.seen.text[place:]
        prompt = self.tail(self.signed[:number], anchor, prompt=True) if number else None
        if self.role(number) != "assistant":
            prompt = None
        if prompt is not None and actual.startswith(prompt):
            return place + len(prompt)
        header = self.header(number, anchor, actual)
        if header is None or (prompt is not None and not prompt.startswith(header)):
            raise self.refusal("what it writes before the turn is not what it writes as a prompt", number)
        return place + len(header)

    def header(self, number: int, anchor: int | None, actual: str) -> str | None:
        """What stands before a message whatever its content is."""
        kept = {key: value for key, value in self.messages[number].items() if key in ("role", "name", "tool_call_id")}
        probe = {**kept, "content": marks.PROBE}
        for after in (self.signed[number + 1 :], []):
            tail = self.tail([*self.signed[:number], probe, *after], anchor)
            if tail is not None and marks.PROBE in tail:
                return common([actual, tail])
        return None

    def tail(self, messages: Sequence[Mapping[str, Any]], anchor: int | None, prompt: bool = False) -> str | None:
        """A rendering after the last mark of message `anchor`, or all of it; None if there is no such place."""
        found = self.render(messages, prompt)
        if found is None or (anchor is not None and anchor not in found.lasts):
            return None
        return found.text[found.lasts[anchor] if anchor is not None else 0 :]

    def end(self, number: int) -> int:
        """Where a message's turn ends: after its end token."""
        place = self.seen.lasts[number]
        gap = self.seen.text[place:]
        following = self.role(number + 1) if number + 1 < len(self.messages) else None
        key = (self.role(number), "tool_calls" in self.messages[number], following)
        closing = self.parent._closings.get(key)
        if closing is None or not gap.startswith(closing):
            closing = self.parent._closings[key] = self.closing(number, gap)
        return place + len(closing)

    def closing(self, number: int, gap: str) -> str:
        """What the template writes after a message whatever follows, up to its last added token."""
        until = self.signed[: number + 1]
        another = "user" if self.role(number) != "user" else "assistant"
        final = self.tail(until, number)
        follows = [self.tail(until, number, prompt=True)]
        follows += [self.tail([*until, {"role": another, "content": marks.PROBE}], number)]
        known = [gap, *(tail for tail in (final, *follows) if tail is not None)]
        found = self.parent.closing(common(known))
        if not found and number == len(self.messages) - 1:
            found = self.parent.first(gap)  # a last turn that ends with another token than one in the middle
        last = final if final is not None and final.startswith(found) else gap[: len(found)]
        if not found or not self.parent.is_filling(last[len(found) :]):
            raise self.refusal("it writes no end token after the turn, by which the model could learn to stop", number)
        return found

    def with_end(self, number: int, spans: list[Span]) -> list[Span]:
        """The tags' spans with the turn's end token, which some templates leave outside."""
        try:
            end = self.end(number)
        except DataError:
            return spans  # the tags are the template's own word
        begin, tagged = spans[-1]
        if tagged < end and self.parent.is_filling(self.seen.text[tagged:end]):
            return [*spans[:-1], (begin, end)]
        return spans

    def contents(self) -> dict[int, Span]:
        found = {}
        for number, place in self.seen.contents.items():
            core = str(self.messages[number]["content"]).strip()
            if self.seen.text.endswith(core, 0, place):
                found[number] = (place - len(core), place)
        return found

    # ------------------------------------------------------------------ checks

    def role(self, number: int) -> str:
        return str(self.messages[number]["role"])

    def lost(self) -> tuple[int, ...]:
        """Messages that were marked and left no mark."""
        signed = (number for number, one in enumerate(self.signed) if self.is_signed(one))
        return tuple(number for number in signed if number not in self.seen.lasts)

    @staticmethod
    def is_signed(message: Mapping[str, Any]) -> bool:
        return isinstance(message.get("content"), str) and marks.is_reserved(message["content"])

    def verify(self, spans: Mapping[int, list[Span]]) -> None:
        """Each span holds its message's text and nobody else's."""
        for number, parts in spans.items():
            begin, end = parts[0][0], parts[-1][1]
            for place, owner in self.seen.every:
                if (begin < place < end) if owner != number else not begin <= place <= end:
                    raise self.refusal(f"the turn of message {number} can't be told from message {owner}", number)

    def refuse_lost(self, number: int) -> None:
        if self.signed[number] != dict(self.messages[number]):
            raise BadExample(
                "answer_lost",
                f"the chat template leaves message {number} out",
                where=self.where,
                given=str(self.messages[number].get("content")),
                expected=self.parent.template.line_of_role(self.tools, self.role(number)),
                do="correct the row, or use another chat template",
            )
        raise self.refusal(f"message {number} can't be found in its text", number)

    def refusal(self, problem: str, number: int) -> DataError:
        return DataError(
            f"can't tell which tokens of the chat template's text carry loss: {problem}",
            where=self.where,
            given=self.parent.template.line_of_role(self.tools, self.role(number)),
            expected="a template whose turns end with a token of their own, and begin as its generation prompt does",
            do="put {% generation %} ... {% endgeneration %} around what the model says in the template",
        )


def common(texts: Sequence[str]) -> str:
    """The longest begin that all texts share."""
    low, high = min(texts), max(texts)
    return next((low[:place] for place, sign in enumerate(low) if sign != high[place]), low)
