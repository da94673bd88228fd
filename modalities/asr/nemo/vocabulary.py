"""What NeMo's models write in: characters, or the subwords of a SentencePiece or BERT tokenizer."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
from torch import Tensor

from ....common.errors import ModelError
from .files import Origin, resolved, unpack, unreadable

BPE = "nemo.collections.common.tokenizers.canary_tokenizer.CanaryBPETokenizer"
"""NeMo's class of a SentencePiece model that holds a prompt's control tokens too."""


class Tokens(Protocol):
    """From text to token ids.

    Args:
        pieces: the tokens, by id.
    """

    pieces: list[str]

    def encode(self, text: str, language: str | None) -> list[int]:
        """Ids of a text, as NeMo has them; characters that no token writes are left out or become an unknown mark."""

    def unknown(self, text: str, language: str | None) -> set[str]:
        """Characters of a text that no token writes."""


class Characters:
    """A token is a character, or a word that the labels hold whole.

    Args:
        labels: the tokens.
    """

    def __init__(self, labels: Iterable[str]):
        from nemo.collections.common.parts.preprocessing.parsers import CharParser

        self.pieces = [str(label) for label in labels]
        self._known = set(self.pieces)
        self._parser = CharParser(self.pieces, do_normalize=False)

    def encode(self, text: str, language: str | None) -> list[int]:
        return [int(one) for one in self._parser(text)]

    def unknown(self, text: str, language: str | None) -> set[str]:
        words = [word for word in text.split(" ") if len(word) < 2 or word not in self._known]
        return {char for word in words for char in word if char not in self._known} | (
            {" "} if " " in text and " " not in self._known else set()
        )


class Pieces:
    """A token is a subword.

    Args:
        tokenizer: NeMo's.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.languages: dict[str, Any] = getattr(tokenizer, "tokenizers_dict", {})
        self.pieces = list(tokenizer.ids_to_tokens(list(range(tokenizer.vocab_size))))
        self._writes = cache(self._can_write)

    def encode(self, text: str, language: str | None) -> list[int]:
        if not self.languages:
            return list(self.tokenizer.text_to_ids(text))
        return list(self.tokenizer.text_to_ids(text, self._named(language)))

    def unknown(self, text: str, language: str | None) -> set[str]:
        name = self._named(language) if self.languages else ""
        one: Any = self.languages.get(name, self.tokenizer)
        if one.unk_id not in one.text_to_ids(text):
            return set()
        return {char for char in set(text) if not self._writes(char, name)} or set(text)

    def _named(self, language: str | None) -> str:
        if language not in self.languages:
            raise ModelError(
                "the tokenizer has several languages, and not this one",
                where="task.language",
                given=language,
                expected=f"one of {', '.join(self.languages)}, here or in the rows",
            )
        return str(language)

    def _can_write(self, char: str, name: str) -> bool:
        one: Any = self.languages.get(name, self.tokenizer)
        return one.unk_id not in one.text_to_ids(char)


def characters(texts: Iterable[str]) -> list[str]:
    """The characters of texts, in the order of their codes."""
    found: set[str] = set()
    for text in texts:
        found.update(text)
    return sorted(found)


def piece_folder(path: str) -> TemporaryDirectory[str]:
    """A SentencePiece model as NeMo reads it: `tokenizer.model` beside a `vocab.txt`."""
    import sentencepiece

    place = Path(path) / "tokenizer.model" if Path(path).is_dir() else Path(path)
    try:
        tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(place))
    except (OSError, RuntimeError) as error:
        raise ModelError(
            "no SentencePiece model",
            where="model.vocabulary",
            given=path,
            expected="model, data, or the path of a SentencePiece model or of a folder with its tokenizer.model",
        ) from error
    folder = TemporaryDirectory(prefix="luthier-pieces-")
    shutil.copy(place, Path(folder.name) / "tokenizer.model")
    pieces = [tokenizer.id_to_piece(number) for number in range(tokenizer.get_piece_size())]
    (Path(folder.name) / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")
    return folder


def piece_section(folder: str, prompted: bool) -> dict[str, Any]:
    """NeMo's section of such a tokenizer; where there are prompts, it holds their control tokens too."""
    return {"dir": folder, "type": "bpe", **({"custom_tokenizer": {"_target_": BPE}} if prompted else {})}


def own_tokens(origin: Origin) -> Tokens:
    """The vocabulary that a model comes with."""
    if not origin.has_pieces:
        labels = labels_of(origin.config)
        if labels is None:
            raise ModelError(
                "the configuration names no labels", where="model.path", given=str(origin.file),
                do="set model.vocabulary: data, for the characters of the training texts",
            )  # fmt: skip
        return Characters(labels)
    with TemporaryDirectory() as folder:
        if origin.has_weights:
            unpack(origin.file, folder)
        section = _local(resolved(origin.config.tokenizer), folder)
        try:
            return pieces_of(section)
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            raise unreadable(str(origin.file), error) from error


def labels_of(config: Any) -> list[str] | None:
    """The labels of a model that writes characters, None where its configuration leaves them open."""
    from omegaconf.errors import OmegaConfBaseException

    transducer = "joint" in config  # is built from `labels`; a CTC model from its decoder's
    for section, key in ((config, "labels"),) if transducer else ((config.decoder, "vocabulary"), (config, "labels")):
        try:
            found = section.get(key)
        except OmegaConfBaseException:  # a reference to what is open
            continue
        if found and not isinstance(found, str):
            return [str(label) for label in found]
    return None


def _local(section: Any, folder: str) -> Any:
    """A tokenizer section with the paths of its files, which a `.nemo` calls `nemo:NAME`."""
    for key, value in section.items():
        if isinstance(value, str) and value.startswith("nemo:"):
            section[key] = str(Path(folder) / value.removeprefix("nemo:"))
        elif hasattr(value, "items"):
            _local(value, folder)
    return section


def pieces_of(section: Any) -> Pieces:
    """The subwords of such a section, by NeMo's own tokenizer, without a model around it."""
    from nemo.collections.asr.parts.mixins import ASRBPEMixin
    from nemo.core.classes.common import Serialization
    from omegaconf import OmegaConf

    class Maker(ASRBPEMixin, Serialization):  # type: ignore[misc]
        def register_artifact(self, _key: str, src: str, **_: Any) -> str:
            return src

    maker = Maker()
    maker._setup_tokenizer(OmegaConf.create(section))
    return Pieces(maker.tokenizer)


# ------------------------------------------------------------------ another vocabulary

_TABLES = re.compile(
    r"(^|\.)(decoder_layers\.0\.(weight|bias)|prediction\.embeds?\b.*weight|joint_net\.\d+\.(weight|bias))$"
)
"""Tensors with a row for each token, then one for the blank, then those that a transducer may have besides."""
_FILLED = re.compile(r"^(transf_decoder\._embedding\.token_embedding|log_softmax\.mlp\.layer0)\.(weight|bias)$")
"""Tensors with a row for each token, then some that stand for nothing."""


@torch.no_grad()
def change(model: Any, old: Tokens, new: Tokens, renew: Callable[[], None]) -> None:
    """Give a model another vocabulary and keep what it has learned of tokens that stay, and of the blank.

    NeMo makes the decoder anew whatever the vocabulary is.

    Args:
        model: NeMo's.
        old: its vocabulary.
        new: the other.
        renew: calls `change_vocabulary`.
    """
    if old.pieces == new.pieces:
        return
    before = {name: value.clone() for name, value in model.state_dict().items()}
    renew()
    ids = {piece: number for number, piece in enumerate(old.pieces)}
    shared = [(number, ids[piece]) for number, piece in enumerate(new.pieces) if piece in ids]
    for name, value in model.state_dict().items():
        if _TABLES.search(name):
            further = len(value) - len(new.pieces)  # the blank and what follows it
            more = [(len(new.pieces) + number, len(old.pieces) + number) for number in range(further)]
            _keep_rows(value, before[name], [*shared, *more])
        elif _FILLED.search(name):
            _keep_rows(value, before[name], shared)
        elif name in before and before[name].shape == value.shape:
            value.copy_(before[name])


def _keep_rows(table: Tensor, old: Tensor, rows: list[tuple[int, int]]) -> None:
    if rows:
        to, of = (torch.tensor(side) for side in zip(*rows, strict=True))
        table[to] = old[of]
