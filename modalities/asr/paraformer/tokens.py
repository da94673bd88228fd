"""What the model writes: FunASR's tokenizers, what their token lists lack, and adding it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ....common.errors import ModelError
from ..text import normalize
from ..utterance import Utterance
from .config import Config
from .directory import Directory, registered

_GOES_ON = "@@"  # ends a piece that the word goes on after, as FunASR's text assembly knows it


class Tokens:
    """Texts to token ids and back.

    Args:
        directory: holds the token list.
        recipe: for what is trained of a text.
    """

    def __init__(self, directory: Directory, recipe: Config):
        self.recipe = recipe
        settings = dict(directory.tokenizer)
        if directory.tokens is not None:
            settings["token_list"] = directory.tokens
        if directory.seg_dict is not None:
            settings["seg_dict"] = str(directory.seg_dict)
        if directory.pieces is not None:
            settings["bpemodel"] = str(directory.pieces)
        try:
            self.tokenizer = registered("tokenizer", directory.config["tokenizer"])(**settings)
        except (RuntimeError, TypeError, OSError) as error:
            raise ModelError("the tokenizer can't be made", where=directory.path, given=error) from error
        self.pieces = directory.pieces is not None

    @property
    def listed(self) -> list[str] | None:
        """The token list; None with sentence pieces."""
        found: list[str] | None = None if self.pieces else self.tokenizer.token_list
        return found

    @property
    def seg_dict(self) -> dict[str, str] | None:
        """Tokens of words, separated by spaces."""
        found: dict[str, str] | None = getattr(self.tokenizer, "seg_dict", None)
        return found

    def __len__(self) -> int:
        return int(self.tokenizer.get_vocab_size()) if self.pieces else len(self.tokenizer.token_list)

    # ------------------------------------------------------------------ texts

    def text(self, utterance: Utterance) -> str:
        """What of the transcript is trained."""
        form, text = self.recipe.task.text, " ".join(utterance.text.split())
        if form == "normalized":
            return normalize(text, utterance.language or self.recipe.task.language)
        return text.lower() if form == "lower" else text

    def encode(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(text)
        return found

    def number(self, token: str) -> int | None:
        """The id of one token, None if there is no such."""
        if self.pieces:
            found = int(self.tokenizer.sp.PieceToId(token))
            return None if found == self.tokenizer.sp.unk_id() else found
        listed: int | None = self.tokenizer.token2id.get(token)
        return listed

    def written(self, ids: Sequence[int]) -> list[str]:
        """The token of each id, for reading."""
        if self.pieces:
            return [str(self.tokenizer.sp.IdToPiece(number)) for number in ids]
        return [self.tokenizer.token_list[number] for number in ids]

    def unknown(self, text: str) -> list[str]:
        """What has no token: characters, or words where the tokenizer goes by words."""
        if self.pieces:
            mark, encode = self.tokenizer.sp.unk_id(), self.tokenizer.sp.EncodeAsIds
            return [word for word in text.split() if mark in encode(word)]
        known, mark = self.tokenizer.token2id, self.tokenizer.unk_symbol
        if self.seg_dict is None:
            return [token for token in self.tokenizer.text2tokens(text) if token not in known]
        tokens = self.tokenizer.text2tokens
        return [word for word in text.split() if any(t == mark or t not in known for t in tokens(word))]

    # ------------------------------------------------------------------ new tokens

    def extend(self, tokens: Iterable[str]) -> None:
        """Append tokens to the list; those that are there already stay where they are."""
        if self.pieces:
            raise ModelError("sentence pieces can't be added to", where="model.new_tokens", expected="a token list")
        for token in tokens:
            if token not in self.tokenizer.token2id:
                self.tokenizer.token2id[token] = len(self.tokenizer.token_list)
                self.tokenizer.token_list.append(token)

    def learn(self, texts: Iterable[str]) -> None:
        """Add what the texts need: characters, or the letters of words with their entries in the dictionary."""
        unknown = sorted({item for text in texts for item in self.unknown(text)})
        if self.seg_dict is None:
            self.extend(unknown)
            return
        spelled = {word.lower(): spell(word.lower()) for word in unknown}
        self.extend(sorted({piece for pieces in spelled.values() for piece in pieces}))
        for word, pieces in spelled.items():
            if all(stands_alone(letter) for letter in word):  # found letter by letter, in any word
                self.seg_dict.update({letter: letter for letter in word})
            else:
                self.seg_dict[word] = " ".join(pieces)


def stands_alone(letter: str) -> bool:
    """Whether FunASR's text assembly puts no space around it: Chinese characters and digits."""
    return "\u4e00" <= letter <= "\u9fff" or "0" <= letter <= "9"


def spell(word: str) -> list[str]:
    """A word as pieces of one letter, from which FunASR's text assembly (`sentence_postprocess`) makes the word again:
    a letter says whether its word goes on, unless it stands alone."""
    following = [*word[1:], None]
    return [
        letter if stands_alone(letter) or after is None or stands_alone(after) else letter + _GOES_ON
        for letter, after in zip(word, following, strict=True)
    ]
