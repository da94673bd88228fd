"""What a Canary model is asked: control tokens before the transcript, laid out by NeMo's own prompt formatter."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from ....common.errors import BadExample, ModelError, RecipeError
from ..utterance import Utterance
from .files import resolved

FORMATS = ("canary", "canary2")
"""NeMo's prompt formats that ask for a transcript of audio."""
_SPECIAL = "spl_tokens"  # the tokenizer of control tokens among several
_USUAL = {
    "task": "asr", "pnc": "yes", "itn": "no", "timestamp": "no", "diarize": "no", "emotion": "<|emo:undefined|>",
    "decodercontext": "",
}  # fmt: skip
"""What NeMo's training takes where neither a row nor the model says it; `task` and `pnc` as its transcription does."""
_LONGER = {"en": "en-US", "es": "es-ES", "fr": "fr-FR", "de": "de-DE"}
"""NeMo's names of these languages in newer models."""


class Prompts:
    """The prompts of a model, and its texts behind them.

    A slot's value is the row's field of this name, or else that of the recipe, or (languages) the language of the row
    or the recipe, or the model's own default, or NeMo's.

    Args:
        config: NeMo's configuration of the model.
        tokenizer: NeMo's.
        given: values of slots, by the recipe.
    """

    def __init__(self, config: Any, tokenizer: Any, given: Mapping[str, Any]):
        from nemo.collections.common.prompts import PromptFormatter

        name = str(config.get("prompt_format"))
        if name not in FORMATS:
            problem = "a model with this form of prompt can't be trained here"
            raise ModelError(problem, where="prompt_format", given=name, expected=", ".join(FORMATS))
        self.formatter = PromptFormatter.resolve(name)(tokenizer)
        self.tokenizer, self.given = tokenizer, given
        self.slots = tuple(self.formatter.get_slots("user"))
        unknown = [slot for slot in given if slot not in self.slots]
        if unknown:
            problem, expected = "the model's prompt has no such slot", ", ".join(self.slots)
            raise RecipeError(problem, where="task.prompt", given=", ".join(unknown), expected=expected)
        turns = resolved(config).get("prompt_defaults") or []
        self.defaults: dict[str, Any] = {
            slot: value for turn in turns if turn["role"] == "user" for slot, value in turn["slots"].items()
        }
        self._encoded = cache(self._encode)

    def values(self, utterance: Utterance, language: str | None) -> dict[str, str]:
        """The value of each slot; those that nobody says are left out."""
        row = {"task": utterance.extra.get("taskname"), **utterance.extra}
        known = {"source_lang": language, "target_lang": language, "decodercontext": utterance.prompt}
        found = {}
        for slot in self.slots:
            for place in (row, self.given, known, self.defaults, _USUAL):
                if place.get(slot) is not None:
                    found[slot] = str(place[slot])
                    break
        return found

    def target(self, values: Mapping[str, str]) -> str | None:
        """The language that is written, as the tokenizer calls it."""
        name = values.get("target_lang")
        if name is None:
            return None
        name = name.removeprefix("<|").removesuffix("|>")
        known = getattr(self.tokenizer, "langs", (name,))
        longer = _LONGER.get(name)
        return longer if name not in known and longer in known else name

    def encode(self, utterance: Utterance, language: str | None) -> tuple[int, ...]:
        """Tokens of the prompt.

        Raises:
            BadExample: the model has no such prompt.
        """
        values = self.values(utterance, language)
        missing = [slot for slot in self.slots if slot not in values]
        if missing:
            problem, do = "the prompt needs the language", "name it in the rows, or set task.language"
            raise BadExample("no_language", problem, where=utterance.where, given=", ".join(missing), do=do)
        for slot in ("source_lang", "target_lang"):
            token = values[slot] if values[slot].startswith("<|") else f"<|{values[slot]}|>"
            if not self._has(token):
                problem = "the model has no token of this language"
                raise BadExample("unknown_language", problem, where=utterance.where, given=values[slot])
        try:
            return self._encoded(tuple(values.items()))
        except (AssertionError, KeyError, RuntimeError) as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            problem = f"NeMo makes no prompt of it: {first}"
            raise BadExample("bad_prompt", problem, where=utterance.where, given=str(values)) from error

    def _encode(self, values: tuple[tuple[str, str], ...]) -> tuple[int, ...]:
        slots = {**dict(values), "prompt_language": _SPECIAL}
        return tuple(self.formatter.encode_dialog([{"role": "user", "slots": slots}])["context_ids"].tolist())

    def answer(self, text: str, language: str | None) -> list[int]:
        """Tokens of a text in a language of the tokenizer, and the end token."""
        template, slots = self.formatter.get_template("assistant"), self.formatter.get_slots("assistant")
        return list(self.formatter.encode_turn(template, slots, {"text": text, "prompt_language": language}))

    def _has(self, token: str) -> bool:
        special = getattr(self.tokenizer, "special_tokens", None)
        if special is not None:
            return token in special
        return bool(self.tokenizer.token_to_id(token) != self.tokenizer.unk_id)
