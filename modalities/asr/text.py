"""The text that is scored: normalised so that case and punctuation do not count, and cut into the units that do.

The normalisers are Whisper's (Radford et al. 2022, appendix C), as transformers ships them, with two repairs for
languages other than English: combining marks stay, because they are vowels in Hindi, Bengali, Tamil, Thai, Khmer and
many more (Whisper's basic normaliser puts a space in the place of each), and invisible characters do not become words.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, cast

import regex  # type: ignore[import-untyped]

_ENGLISH = {"en", "eng", "english"}
_DOTLESS = {"tr", "tur", "turkish", "az", "aze", "azerbaijani"}
_UNSEGMENTED = {
    *("zh", "zho", "chi", "cmn", "chinese", "mandarin", "yue", "cantonese", "wuu"),
    *("ja", "jpn", "japanese", "th", "tha", "thai", "lo", "lao", "km", "khm", "khmer"),
    *("my", "mya", "bur", "myanmar", "burmese", "bo", "bod", "tib", "tibetan"),
}

# Zero-width joiners are spelling inside a word of Persian or Sinhala, and rubbish anywhere else.
_INVISIBLE = regex.compile(
    r"\p{Variation_Selector}[\u200c\u200d]*|(?<![\p{L}\p{M}])[\u200c\u200d]+|[\p{Cf}--[\u200c\u200d]]", regex.V1
)
# A mark belongs to a letter; what is left of an emoji or of a free-standing accent does not.
_SYMBOLS = regex.compile(r"[\p{S}\p{P}]|(?<![\p{L}\p{M}\u200c\u200d])\p{M}+")
_GRAPHEME = regex.compile(r"\X")


def normalize(text: str, language: str | None, spelling: Mapping[str, str] | None = None) -> str:
    """The text without case, punctuation and symbols, and without what stands in brackets.

    English also loses fillers and accents, and its contractions and numbers are written in one way. Other languages
    keep every letter and every mark on a letter, the optional vowel points of Arabic and Hebrew included.

    Args:
        text: what was said, as written.
        language: code (`hi`), code with region (`hi-IN`, `hi_in`) or English name; None: no rules of one language.
        spelling: British to American spellings for English. transformers has none of its own: it is the
            `english_spelling_normalizer` of a Whisper tokenizer, or `normalizer.json` in a model's directory.
            None: spellings stay as they are.

    Returns:
        Words with one space between them, none at the ends.
    """
    text = unicodedata.normalize("NFC", text).replace("\u200b", " ")
    text = _INVISIBLE.sub("", text)
    if _base(language) in _ENGLISH:
        return " ".join(_english_normalizer(spelling or {})(text).split())
    if _base(language) in _DOTLESS:
        text = text.replace("I", "ı")
    # str.lower turns this letter into two, and the second is a mark that no hypothesis has.
    text = text.replace("İ", "i")
    return " ".join(_basic_normalizer()(text).split())


def is_unsegmented(language: str | None) -> bool:
    """Whether the language writes no spaces between words, so that its characters are counted in place of words.

    Chinese, Cantonese, Japanese, Thai, Lao, Burmese, Khmer and Tibetan, by code, code with region or English name.
    """
    return _base(language) in _UNSEGMENTED


def words(text: str, language: str | None) -> list[str]:
    """The units of a word error rate: words between spaces; for an unsegmented language its characters.

    A character is what a reader sees as one (a grapheme cluster), as in Whisper's `split_letters`: a Thai consonant
    with its vowel sign and tone mark is one.
    """
    if is_unsegmented(language):
        return cast("list[str]", _GRAPHEME.findall("".join(text.split())))
    return text.split()


def _base(language: str | None) -> str:
    """`zh` of `zh-CN` and of `ZH_cn`; empty for None."""
    return re.split("[-_]", (language or "").strip().lower())[0]


def _clean(text: str) -> str:
    text = unicodedata.normalize("NFKC", text)
    # NFKC cuts the vowel am of Thai and Lao in two, which would be two characters.
    text = text.replace("\u0e4d\u0e32", "\u0e33").replace("\u0ecd\u0eb2", "\u0eb3")
    return cast("str", _SYMBOLS.sub(" ", text))


@cache
def _basic_normalizer() -> Callable[[str], str]:
    # transformers takes two seconds to import; who only asks for words need not wait.
    from transformers.models.whisper.english_normalizer import BasicTextNormalizer

    build: Any = BasicTextNormalizer
    normalizer = build(remove_diacritics=False)
    normalizer.clean = _clean
    return cast("Callable[[str], str]", normalizer)


def _english_normalizer(spelling: Mapping[str, str]) -> Callable[[str], str]:
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

    build: Any = EnglishTextNormalizer
    return cast("Callable[[str], str]", build(spelling))
