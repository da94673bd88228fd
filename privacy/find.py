"""All that is found in a text, none of it overlapping."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .kinds import KINDS
from .names import names
from .phones import phones

ALL = (*dict.fromkeys(kind.name for kind in KINDS), "PHONE")
"""Names of all kinds that have a form."""


@dataclass(frozen=True, order=True)
class Found:
    """A value in a text: `text[begin:end]`."""

    begin: int
    end: int
    kind: str


def find(text: str, kinds: Sequence[str] = ALL, languages: Sequence[str] = ()) -> list[Found]:
    """What a text holds, in order.

    Args:
        kinds: which kinds are looked for.
        languages: in which names are looked for too, by Presidio.
    """
    taken: list[Found] = []
    for one in _candidates(folded(text), kinds, languages):
        if all(one.end <= other.begin or one.begin >= other.end for other in taken):
            taken.append(one)
    return sorted(taken)


def folded(text: str) -> str:
    """The text with digits, letters, spaces and hyphens of other forms (such as full-width ones) as ASCII has them,
    each in its place."""
    return text if text.isascii() else text.translate(_PLAIN)


_PLAIN: dict[int, int | str] = {
    **{number: number - 0xFEE0 for number in range(0xFF01, 0xFF5F) if chr(number - 0xFEE0) not in ",;"},
    **dict.fromkeys((0xA0, 0x2007, 0x2009, 0x202F, 0x3000), " "),
    **dict.fromkeys((0x2010, 0x2011, 0x2012, 0x2013, 0x2212), "-"),
}


def _candidates(text: str, kinds: Sequence[str], languages: Sequence[str]) -> Iterator[Found]:
    for kind in KINDS:
        if kind.name not in kinds:
            continue
        for hit in kind.pattern.finditer(text):
            begin, value = hit.start(), hit.group()
            if "value" in kind.pattern.groupindex:
                begin, value = hit.start("value"), hit["value"].rstrip(".!?:")
            if kind.check(value):
                yield Found(begin, begin + len(value), kind.name)
    if "PHONE" in kinds:
        for begin, end in phones(text):
            yield Found(begin, end, "PHONE")
    for language in languages:
        for begin, end, name in names(text, language):
            yield Found(begin, end, name)
