"""A chat template: renders messages, says which line refused them, and gives the same text on any day."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...common.errors import BadExample, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DATE = datetime.date(2024, 7, 26)
"""The day that templates are told which write the current date (Llama 3's own default); else the same data would give
other tokens tomorrow, and a resumed run would not be the same run."""

_WITHOUT_AND_WITH: tuple[list[Any], list[Any]] = ([], [{}])
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DATE_FORMAT = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")


class ChatTemplate:
    """The chat template of a tokenizer.

    Args:
        tokenizer: gives the template, and the special tokens that it writes.
        source: another template; None: the tokenizer's.
        variables: given to the template for every conversation, such as `enable_thinking`.
        date: the day that the template is told.

    Raises:
        DataError: no template, or one that is not valid.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        source: str | None = None,
        variables: Mapping[str, Any] | None = None,
        date: datetime.date = DATE,
    ):
        self.tokenizer, self.variables, self._date = tokenizer, dict(variables or {}), date
        self._given = source
        self.has_tags = any(_GENERATION.search(self.source(tools)) for tools in _WITHOUT_AND_WITH)
        self._check()

    def source(self, tools: Sequence[Any]) -> str:
        """The template's text; some tokenizers have another one for conversations with tools."""
        try:
            return str(self.tokenizer.get_chat_template(self._given, list(tools) or None))
        except ValueError as error:
            raise DataError(
                "the tokenizer has no chat template",
                where="model.path",
                given=str(error).splitlines()[0],
                do="give a chat template, use an instruct model, or train on plain text",
            ) from error

    def _check(self) -> None:
        import jinja2

        try:
            self._run([{"role": "user", "content": "a"}], (), {}, False, False)
        except jinja2.TemplateSyntaxError as error:
            line = self.line((), error.lineno)
            raise DataError(f"the chat template is not valid: {error}", where="chat template", given=line) from error
        except Exception:  # what it makes of one message is no matter here
            return

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        prompt: bool = False,
        where: str | None = None,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: as `Message.as_dict` gives them.
            tools: schemas.
            variables: of this conversation.
            prompt: whether the start of an assistant's turn is added.
            where: place of the row, for messages.

        Raises:
            BadExample: `template_refused` if the template says no, `template_failed` if it stumbles.
        """
        return self._render(messages, tools, variables, prompt, False, where)[0]

    def tagged(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        where: str | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and the spans [start, end) that its generation tags enclose."""
        return self._render(messages, tools, variables, False, True, where)

    def _render(
        self, messages: Any, tools: Any, variables: Any, prompt: bool, tags: bool, where: str | None
    ) -> tuple[str, list[tuple[int, int]]]:
        import jinja2

        try:
            return self._run(messages, tools, variables or {}, prompt, tags)
        except Exception as error:
            refused = type(error) is jinja2.TemplateError  # what `raise_exception` in a template raises
            reason, problem = ("refused", "refuses") if refused else ("failed", "fails on")
            raise BadExample(
                f"template_{reason}",
                f"the chat template {problem} this conversation: {error}",
                where=where,
                given=f"roles {', '.join(str(message.get('role')) for message in messages)}",
                expected=self.line(tools, _line_of(error)),
                do="correct the row, or use another chat template",
            ) from None

    def _run(
        self, messages: Any, tools: Any, variables: Mapping[str, Any], prompt: bool, tags: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: Any = render_jinja_template(  # typed as a string there
            conversations=[list(messages)],
            tools=list(tools) or None,
            chat_template=self._dated(self.source(tools)),
            return_assistant_tokens_mask=tags,
            add_generation_prompt=prompt,
            **{**self.tokenizer.special_tokens_map, **self.variables, **variables},
        )
        texts, spans = rendered
        return texts[0], list(spans[0]) if tags else []

    def _dated(self, source: str) -> str:
        """The template with `strftime_now` set to the fixed day; on its first line, so that line numbers stay."""
        formats = {found[1] for found in _DATE_FORMAT.findall(source)}
        if not formats:
            return source
        cases = "".join(
            f"{{%- if format == {name!r} -%}}{self._date.strftime(name)}{{%- endif -%}}" for name in formats
        )
        newline = "\n" if source.startswith("\n") else ""  # jinja takes one that follows a block
        return f"{{%- macro strftime_now(format) -%}}{cases}{{%- endmacro %}}{newline}{source}"

    def line(self, tools: Sequence[Any], number: int | None) -> str | None:
        """A line of the template with its number, for messages."""
        lines = self.source(tools).splitlines()
        if number is None or not 0 < number <= len(lines):
            return None
        text = lines[number - 1].strip()
        return f"chat template, line {number}: {text if len(text) <= 300 else text[:300] + ' ...'}"

    def line_of_role(self, tools: Sequence[Any], role: str) -> str | None:
        """The line that writes a role's messages, as well as can be told: the first that names it, else the content."""
        lines = self.source(tools).splitlines()
        for words in ((f"'{role}'",), (f'"{role}"',), ("content",)):
            found = [number for number, line in enumerate(lines, 1) if all(word in line for word in words)]
            if found:
                return self.line(tools, found[0])
        return self.line(tools, 1)


def _line_of(error: Exception) -> int | None:
    """The template's line at which an error was raised; jinja puts such frames into the traceback."""
    found, trace = None, error.__traceback__
    while trace is not None:
        if "__jinja_exception__" in trace.tb_frame.f_globals:
            found = trace.tb_lineno
        trace = trace.tb_next
    return found
