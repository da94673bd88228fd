"""The tokenizer of an embedding model or reranker, and what the model was saved with: longest text and prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ...common.errors import ModelError, RecipeError, unreadable_model
from ...common.recipe import ModelSection
from .example import Text, key_of

FAMILY = "an embedding model or an encoder"
SETTINGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Files with the longest text, as sentence-transformers has named them."""
OFFSET = ("roberta", "xlm-roberta", "xlm-roberta-xl", "roberta-prelayernorm", "camembert", "mpnet", "xmod")
"""Families that number positions from the padding token's id + 1 on."""
PROMPTS = {"query": ("query",), "document": ("document", "passage", "corpus")}
"""Names under which sentence-transformers looks for a saved prompt."""


class TextTokenizer:
    """Texts as tokens, cut to a limit, with all that was cut counted.

    The tokenizers library truncates by a setting of the tokenizer, which all threads share; here the tokens are cut
    afterwards, to the same result.

    Args:
        section: the recipe's model.
        weights: directory of a saved model, whose tokenizer and settings are used.

    Raises:
        ModelError: no such tokenizer.
    """

    def __init__(self, section: ModelSection, weights: Path | None):
        path = section.path if weights is None else str(weights)
        try:
            self._load(path, section)
        except (OSError, ValueError) as error:
            raise unreadable_model(path, error, FAMILY) from error
        self.pad: int = next((i for i in (self.hf.pad_token_id, self.hf.eos_token_id) if i is not None), 0)
        self._special = set(self.hf.all_special_ids)
        self._prompt_tokens = {"": 0}
        self._has_types = "token_type_ids" in self.hf.model_input_names
        self._is_cut_left = self.hf.truncation_side == "left"
        self.backend.no_truncation()  # a saved tokenizer may bring both
        self.backend.no_padding()

    def _load(self, path: str, section: ModelSection) -> None:
        from transformers import AutoConfig, AutoTokenizer

        folder = _module(path)
        settings: dict[str, Any] = next((found for name in SETTINGS if (found := _json(path, name, folder))), {})
        options = dict(settings.get("processor_kwargs") or settings.get("tokenizer_args") or {})
        if settings.get("max_seq_length"):
            options.setdefault("model_max_length", settings["max_seq_length"])
        options |= {"trust_remote_code": section.trust_remote_code, "subfolder": folder}
        self.hf: Any = AutoTokenizer.from_pretrained(path, **options)
        if not self.hf.is_fast:
            raise ModelError("the tokenizer is not of the tokenizers library", where="model.path", given=path)
        self.backend: Any = self.hf.backend_tokenizer
        if settings.get("do_lower_case"):
            _lowercase(self.backend)
        base = _module(section.path)
        config = AutoConfig.from_pretrained(
            section.path, subfolder=base, trust_remote_code=section.trust_remote_code
        ).get_text_config()
        self.positions = _positions(config, self.hf.pad_token_id)
        self.limit = min(self.hf.model_max_length, self.positions or self.hf.model_max_length)
        self.lengths: dict[str, int | None] = {role: settings.get(f"{role}_length") for role in PROMPTS}
        prompts = (_json(path, "config_sentence_transformers.json", "") or {}).get("prompts") or {}
        self.prompts: dict[str, str] = {
            role: next((prompts[name] for name in names if prompts.get(name)), "") for role, names in PROMPTS.items()
        }

    def limit_of(self, role: str, given: int | None, where: str) -> int:
        """Tokens of the longest `query` or `document`: the recipe's number, or the model's own.

        Raises:
            RecipeError: the model has no positions for so many.
        """
        if given is not None and self.positions is not None and given > self.positions:
            expected = f"at most {self.positions}"
            raise RecipeError("longer than the model can read", where=where, given=given, expected=expected)
        return given or self.lengths[role] or int(self.limit)

    def prompt_tokens(self, prompt: str) -> int:
        """Tokens that a prompt takes, with the special ones before it but without those after it."""
        if prompt not in self._prompt_tokens:
            ids = self.backend.encode(prompt).ids
            self._prompt_tokens[prompt] = len(ids) - (ids[-1] in self._special)
        return self._prompt_tokens[prompt]

    def texts(self, texts: Sequence[str], limit: int, prompt: str = "") -> list[Text]:
        """Single texts of at most `limit` tokens, each with the prompt before it."""
        taken, found = self.prompt_tokens(prompt), []
        for text, encoding in zip(texts, self.backend.encode_batch([prompt + text for text in texts]), strict=True):
            kept, (cut, _) = self._kept(encoding, limit)
            ids = np.array(encoding.ids, dtype=np.int32)[kept]
            begin = max(0, taken - cut) if self._is_cut_left else taken
            found.append(Text(ids, key_of(text), begin, cut=cut))
        return found

    def pairs(self, first: str, seconds: Sequence[str], keys: Sequence[int], limit: int) -> list[tuple[Text, int]]:
        """A text together with each of others, in at most `limit` tokens; the longer side is cut first.

        Args:
            first: in front.
            seconds: the others.
            keys: of the others.
            limit: most tokens of both.

        Returns:
            Both as one text, `cut` of the second side; and tokens cut off the first.
        """
        found = []
        encodings = self.backend.encode_batch([(first, second) for second in seconds])
        for key, encoding in zip(keys, encodings, strict=True):
            kept, cuts = self._kept(encoding, limit)
            ids = np.array(encoding.ids, dtype=np.int32)[kept]
            second = self._second(np.array(encoding.type_ids)[kept])
            found.append((Text(ids, key, 0, second, cuts[1]), cuts[0]))
        return found

    def _kept(self, encoding: Any, limit: int) -> tuple[np.ndarray | slice, tuple[int, int]]:
        """(which tokens stay, tokens cut off the first and the second text); special tokens always stay."""
        if len(encoding) <= limit:
            return slice(None), (0, 0)
        sides = np.array([-1 if side is None else side for side in encoding.sequence_ids], dtype=np.int8)
        lengths = int((sides == 0).sum()), int((sides == 1).sum())
        wanted = longest_first(*lengths, max(0, limit - int((sides < 0).sum())))
        kept = np.ones(len(sides), dtype=bool)
        for side, (length, stay) in enumerate(zip(lengths, wanted, strict=True)):
            places = np.flatnonzero(sides == side)
            kept[places[: length - stay] if self._is_cut_left else places[stay:]] = False
        return kept, (lengths[0] - wanted[0], lengths[1] - wanted[1])

    def _second(self, types: np.ndarray) -> int:
        """Where token type 1 begins; 0: the model has no types."""
        if not self._has_types or not types.any():
            return 0
        begin = int(np.argmax(types))
        if (types != (np.arange(len(types)) >= begin)).any():
            raise ModelError("token types that are not 0 before 1", where="model.path", given=types.tolist())
        return begin

    def read(self, ids: Sequence[int]) -> str:
        """Tokens as text, without special ones."""
        found: str = self.hf.decode(list(ids), skip_special_tokens=True)
        return found

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token after the one before it: alone, some tokenizers would leave out a space."""
        alone = [self.hf.decode([number]) for number in ids]
        pairs = [self.hf.decode(list(pair)) for pair in pairwise(ids)]
        return [*alone[:1], *(pair.removeprefix(before) for pair, before in zip(pairs, alone, strict=False))]


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Tokens that two texts keep of `room`, the longer being cut first: transformers' truncation `longest_first`."""
    if first + second <= room:
        return first, second
    short = min(first, second)
    if 2 * short > room:
        short = room // 2
    return (short, room - short) if first <= second else (room - short, short)


def _json(path: str, name: str, folder: str) -> Any:
    """A model's JSON file, in a directory or on the hub; None if it has none."""
    from transformers.utils.hub import cached_file

    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    file = cached_file(path, name, subfolder=folder, **quiet)
    return None if file is None else json.loads(Path(file).read_text(encoding="utf-8"))


def _module(path: str) -> str:
    """Folder of a SentenceTransformer's first module, which holds the transformers model; of others the root."""
    modules = _json(path, "modules.json", "")
    return str(modules[0]["path"]) if modules else ""


def _positions(config: Any, pad: int | None) -> int | None:
    """Tokens that the model has positions for; None: no such limit."""
    found = getattr(config, "max_position_embeddings", None)
    if not isinstance(found, int) or found < 1:
        return None
    return found - (pad + 1) if config.model_type in OFFSET and pad is not None else found


def _lowercase(backend: Any) -> None:
    """Lower-case texts first, as sentence-transformers does for a model that was saved so."""
    from tokenizers import normalizers

    rest = [backend.normalizer] if backend.normalizer is not None else []
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *rest])


def resolved(tokenizer: TextTokenizer, given: Mapping[str, str | None]) -> dict[str, str]:
    """Prompts by role: the recipe's, or those that the model was saved with."""
    return {role: saved if (own := given.get(role)) is None else own for role, saved in tokenizer.prompts.items()}
