"""One turn of a chat about a recording: what is asked, and what of the answer carries loss.

Loss begins where generation begins, after what `add_generation_prompt` writes, and ends with the turn's end token, all
as places in the one rendering of the whole turn. Templates that write a prompt otherwise than the turn are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ....common.errors import BadExample, DataError, ModelError


@dataclass(frozen=True)
class Turn:
    """A turn.

    Args:
        prompt: text up to where generation begins, with one audio token.
        answer: tokens that carry loss, the end token last.
    """

    prompt: str
    answer: tuple[int, ...]


class Turns:
    """Makes turns by a processor's chat template.

    Args:
        processor: transformers' processor of text and audio, with a fast tokenizer.

    Raises:
        ModelError: it has no chat template.
    """

    def __init__(self, processor: Any):
        self.processor, self.tokenizer = processor, processor.tokenizer
        if processor.chat_template is None:
            raise ModelError("the model's processor has no chat template", where="model.path")
        if not self.tokenizer.is_fast:
            raise ModelError("a fast tokenizer is needed, which knows the places of tokens", where="model.path")
        added = (str(token.content) for token in self.tokenizer.added_tokens_decoder.values())
        longest_first = sorted(filter(None, added), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def __call__(self, instruction: str, system: str | None, text: str, where: str) -> Turn:
        """A turn.

        Args:
            instruction: what the user asks.
            system: message before it; None: the template's own.
            text: the answer.
            where: place of the row.

        Raises:
            BadExample: `control_token`: a text spells one, which the model would read as such.
            DataError: the template's answer can't be told from its prompt.
        """
        for said in (instruction, system or "", text):
            if (found := self._added.search(said)) is not None:
                problem = "a text spells a control token, which the model would read as one"
                raise BadExample("control_token", problem, where=where, given=found.group(), do="correct the row")
        asked = [{"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": instruction}]}]
        if system is not None:
            asked.insert(0, {"role": "system", "content": [{"type": "text", "text": system}]})
        prompt = self._render(asked, True)
        whole = self._render([*asked, {"role": "assistant", "content": [{"type": "text", "text": text}]}], False)
        return Turn(prompt, self._answer(prompt, whole, text))

    def _render(self, messages: list[dict[str, Any]], prompt: bool) -> str:
        found: str = self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        return found

    def _answer(self, prompt: str, whole: str, text: str) -> tuple[int, ...]:
        rest = whole.removeprefix(prompt)
        ends = [match.end() for match in self._added.finditer(rest)]
        if rest == whole or not rest.startswith(text) or not ends:
            raise DataError(
                "the chat template writes an answer otherwise than after its own prompt",
                where="chat template", given=repr(whole), expected=f"{prompt!r}, the text, and an end token",
            )  # fmt: skip
        until = len(prompt) + ends[-1]
        found = self.tokenizer(whole[:until], add_special_tokens=False, return_offsets_mapping=True)
        begins = [begin for begin, _ in found.offset_mapping]
        before = sum(begin < len(prompt) for begin in begins)
        if found.input_ids[:before] != self.tokenizer(prompt, add_special_tokens=False).input_ids:
            raise DataError(
                "the prompt's tokens are others when an answer follows", where="chat template", given=repr(prompt)
            )
        return tuple(found.input_ids[before:])
