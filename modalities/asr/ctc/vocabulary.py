"""The vocabulary of a CTC model: the model's own, extended, or new from the training text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ....common.errors import BadExample, ModelError, unreadable_model
from .. import manifest
from .config import Config
from .spelling import Labels, characters

FAMILY = "a model for CTC"
BLANK, UNKNOWN, SPACE = "<pad>", "<unk>", "|"
_FILES = ("vocab.json", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer and where its tokens come from.

    Args:
        tokenizer: transformers' tokenizer, whose padding token is the blank.
        rows: for each token its row in the start model's output layer, None for a new one; None: it is as it was.
    """

    tokenizer: Any
    rows: tuple[int | None, ...] | None = None

    @property
    def tokens(self) -> list[str]:
        """All tokens, by id; of ids that no token has, empty."""
        return _by_id(self.tokenizer.get_vocab())


def vocabulary(recipe: Config, weights: Path | None) -> Vocabulary:
    """The vocabulary of a recipe, or of the model that was saved in `weights`.

    Raises:
        ModelError: the model has no vocabulary, or one of another form than the recipe needs.
    """
    from transformers import AutoConfig

    start = load_tokenizer(recipe.model.path, recipe.model.language)
    if weights is not None:
        saved = load_tokenizer(str(weights), None)
        if saved is None:
            raise unreadable_model(str(weights), FileNotFoundError("no tokenizer"), FAMILY)
        # An adapter's base has its own output layer, which has to get the saved one's size.
        return _beside(saved, start) if recipe.model.lora else Vocabulary(saved)
    kind = recipe.task.vocabulary
    if start is None and kind != "new":
        raise ModelError(
            "the model has no vocabulary",
            where="model.path",
            given=recipe.model.path,
            do="set task.vocabulary: new, for the characters of the training text",
        )
    if kind == "model":
        return Vocabulary(start)
    chars = characters(_texts(recipe), recipe.task)
    if kind == "new":
        return _beside(_new([BLANK, UNKNOWN, SPACE, *(char for char in chars if char != SPACE)]), start)
    config = AutoConfig.from_pretrained(recipe.model.path)
    return _extended(start, chars, recipe, int(config.vocab_size or 0))


def load_tokenizer(path: str, language: str | None) -> Any:
    """The tokenizer of a model; None if it has none.

    Args:
        path: directory or hub name.
        language: of a vocabulary with several.
    """
    from transformers import AutoTokenizer

    if Path(path).is_dir() and not any((Path(path) / name).is_file() for name in _FILES):
        return None
    more = {} if language is None else {"target_lang": language}
    try:
        found: Any = AutoTokenizer.from_pretrained(path, **more)
    except KeyError as error:
        raise ModelError("the vocabulary has no such language", where="model.language", given=language) from error
    except (OSError, ValueError, TypeError) as error:
        raise unreadable_model(path, error, FAMILY) from error
    if found.pad_token_id is None:
        problem = "the tokenizer has no padding token, which is CTC's blank"
        raise ModelError(problem, where="model.path", given=path)
    return found


def _texts(recipe: Config) -> Iterator[str]:
    for source in recipe.data.train:
        for item in manifest.utterances(source.path, source.split, source.label):
            if not isinstance(item, BadExample):
                yield item.text


def _new(tokens: Iterable[str], **settings: Any) -> Any:
    """A tokenizer of characters, with these tokens from id 0."""
    return _tokenizer(dict(zip(tokens, range(1 << 30), strict=False)), **settings)


def _tokenizer(ids: dict[str, int], **settings: Any) -> Any:
    from transformers import Wav2Vec2CTCTokenizer

    default = {"pad_token": BLANK, "unk_token": UNKNOWN, "word_delimiter_token": SPACE}
    with TemporaryDirectory() as folder:
        file = Path(folder) / "vocab.json"
        file.write_text(json.dumps(ids, ensure_ascii=False), encoding="utf-8")
        return Wav2Vec2CTCTokenizer(str(file), **({"bos_token": None, "eos_token": None} | default | settings))


def _extended(start: Any, chars: list[str], recipe: Config, size: int) -> Vocabulary:
    """The tokens of `start` with their ids, and then the characters that it lacks.

    Args:
        size: rows of the model's output layer.
    """
    from transformers import Wav2Vec2CTCTokenizer

    if not isinstance(start, Wav2Vec2CTCTokenizer):
        raise ModelError(
            "only a vocabulary of characters can be extended",
            where="task.vocabulary",
            given=type(start).__name__,
            do="keep the model's vocabulary (model), or build another (new)",
        )
    labels = Labels(start, recipe.task)
    written = [char.upper() if start.do_lower_case else char for char in chars if labels.unknown(char)]
    added = [char for char in dict.fromkeys("".join(written)) if char != start.word_delimiter_token]
    if not added:
        return Vocabulary(start)
    ids = dict(start.get_vocab())
    first = max(size, max(ids.values()) + 1)
    ids |= {char: first + number for number, char in enumerate(added)}
    names = ("pad_token", "unk_token", "bos_token", "eos_token", "word_delimiter_token", "do_lower_case")
    settings = {name: getattr(start, name) for name in names}
    rows = [row if row < size else None for row in range(first + len(added))]
    return Vocabulary(_tokenizer(ids, **settings), tuple(rows))


def _beside(tokenizer: Any, start: Any) -> Vocabulary:
    """A vocabulary with the rows that its tokens had in the model's own."""
    tokens, old = _by_id(tokenizer.get_vocab()), dict(start.get_vocab()) if start is not None else {}
    if tokens == _by_id(old):
        return Vocabulary(tokenizer)
    names = ("pad_token", "unk_token", "word_delimiter_token")  # another text, but the same meaning
    same = {getattr(tokenizer, name, None): getattr(start, name, None) for name in names}
    return Vocabulary(tokenizer, tuple(old.get(same.get(token) or token) for token in tokens))


def _by_id(ids: dict[str, int]) -> list[str]:
    names = {number: token for token, number in ids.items()}
    return [names.get(number, "") for number in range(max(names, default=-1) + 1)]
