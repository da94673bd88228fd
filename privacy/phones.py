"""Phone numbers, by phonenumbers (Google's libphonenumber)."""

from __future__ import annotations

import re
from collections.abc import Iterator

REGIONS = ("US", "GB", "IT", "FR", "DE", "CN")
"""Regions whose national numbers are known."""

_CANDIDATE = re.compile(
    r"(?<![\w.+/-])(?:(?:\+|00)\d|\(?\d)(?:[ ().\-/]{0,3}\d){6,16}(?![A-Za-z0-9]|[.,-]\d)", re.ASCII
)
_WORDS = re.compile(
    r"\b(?:tele|cell)?phone|\bmobile|\bcell\b|\btel\b|\bcall(?:s|ed|ing)?\b|\bfax|whatsapp|\btext me|\breach|telefon"
    r"|cellulare|\bchiam|\brufen|\banruf|\bhandy|nummer ist|\berreich|téléphone|\bportable|\bappel|\bjoindre|\bnuméro"
    r"|电话|手机|拨打|致电|联系|号码",
    re.IGNORECASE,
)
_OTHER = re.compile(
    r"\border|invoice|bestell|rechnung|\bordine|fattura|commande|facture|订单|发票|isbn|serial|version|ticket|#$", re.I
)
_YEAR = r"(?:19|20)\d\d"
_DATE = re.compile(rf"(?<!\d){_YEAR}([-./ ])\d\d?\1\d\d?(?!\d)|(?<!\d)\d\d?([-./ ])\d\d?\2{_YEAR}(?!\d)"
                   rf"|(?<!\d){_YEAR} ?[-/] ?{_YEAR}(?!\d)")  # fmt: skip
"""A day, the year first or last, or a span of years."""
REACH = 40
"""Characters before a number, and half as many after it, in which a word that says what it is counts."""


def phones(text: str) -> Iterator[tuple[int, int]]:
    """(begin, end) of each number in a text.

    With a country code a valid number is one. A national number has to be valid in one of the regions, and either stand
    beside a word such as `phone` or look like a whole one in groups; one after a word such as `order` is none, nor is
    a date or a span of years.
    """
    import phonenumbers

    for hit in _CANDIDATE.finditer(text):
        given, before = hit.group(), text[max(0, hit.start() - REACH) : hit.start()]
        after = text[hit.end() : hit.end() + REACH // 2]
        international = given.startswith(("+", "00"))
        if not international and not _may_be_national(given, before, after):
            continue
        plain = "+" + given[2:] if given.startswith("00") else given
        for region in (None,) if international else REGIONS:
            try:
                number = phonenumbers.parse(plain, region)
            except phonenumbers.NumberParseException:
                continue
            if phonenumbers.is_valid_number(number):
                yield hit.start(), hit.end()
                break


def _may_be_national(given: str, before: str, after: str) -> bool:
    if _DATE.search(given):
        return False
    said = list(_WORDS.finditer(before))
    other = list(_OTHER.finditer(before))
    if other and (not said or other[-1].start() > said[-1].start()):
        return False
    if said or _WORDS.search(after):
        return True
    grouped = re.fullmatch(r"\(?0?\d{2,4}\)?[ ./-]{1,3}\d{2,4}(?:([ .-]{1,3})\d{2,4}(?:\1\d{2,4}){0,3})", given)
    whole = given.lstrip("(").startswith("0") or sum(one.isdigit() for one in given) >= 10
    return grouped is not None and whole and re.fullmatch(r"\d{3}-\d\d-\d{4}", given) is None  # an American's number
