"""Examples of a language model's training: a conversation, or a text. Immutable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

ROLES = ("system", "user", "assistant", "tool")

ArgumentStyle = Literal["object", "string"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an assistant makes; `arguments` are parsed, whatever form the row had them in."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Args:
        role: one of `ROLES`.
        content: its text; None for an assistant that only calls tools.
        reasoning: what an assistant thinks before it answers.
        tool_calls: calls that an assistant makes.
        tool_call_id: the call that a tool answers.
        name: who speaks, or which tool answers.
        train: whether it carries loss; None: as the recipe has it.
    """

    role: str
    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    train: bool | None = None

    def as_dict(self, arguments: ArgumentStyle = "object") -> dict[str, Any]:
        """As chat templates read it. Keys without a value are left out, as transformers does.

        Args:
            arguments: how tool arguments are given: most templates write an object as JSON themselves, some (DeepSeek)
                expect the JSON text.
        """
        given: dict[str, Any] = {"role": self.role, "content": self.content, "reasoning_content": self.reasoning}
        given |= {"tool_call_id": self.tool_call_id, "name": self.name}
        if self.tool_calls:
            given["tool_calls"] = [_call(call, arguments) for call in self.tool_calls]
        return {key: value for key, value in given.items() if value is not None}


def _call(call: ToolCall, style: ArgumentStyle) -> dict[str, Any]:
    arguments: Any = dict(call.arguments) if style == "object" else json.dumps(call.arguments, ensure_ascii=False)
    named = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    return named if call.id is None else {"id": call.id, **named}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order, and what the template is told beside them.

    Args:
        messages: at least one.
        where: place in the source, `file:line`.
        source: name of the data set in the recipe.
        tools: JSON schemas of the tools that the assistant may call.
        variables: variables of the template for this row, such as `enable_thinking`.
        extra: all other fields of the row, usable as slices.
    """

    messages: tuple[Message, ...]
    where: str
    source: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Text:
    """A text without roles: all of it carries loss, but for the prompt before it, if there is one.

    Args:
        text: what is learned.
        where: place in the source, `file:line`.
        source: name of the data set in the recipe.
        prompt: what precedes `text` and carries no loss; None: nothing does.
        extra: all other fields of the row, usable as slices.
    """

    text: str
    where: str
    source: str = ""
    prompt: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def as_conversation(self) -> Conversation:
        """Prompt and text as a user's and an assistant's message, for models with a chat template."""
        asked = () if self.prompt is None else (Message("user", self.prompt),)
        return Conversation((*asked, Message("assistant", self.text)), self.where, self.source, extra=self.extra)
