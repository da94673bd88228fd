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
    r"phone|mobile|\bcell|\btel\b|tel[.:]|call|fax|whatsapp|text me|reach|telefon|telefono|cellulare|chiam|rufen|anruf"
    r"|handy|nummer ist|erreich|téléphone|portable|appel|joindre|numéro|电话|手机|拨打|致电|联系|号码",
    re.IGNORECASE,
)
_OTHER = re.compile(
    r"order|invoice|bestell|rechnung|ordine|fattura|commande|facture|订单|发票|isbn|serial|version|ticket|#$", re.I
)
REACH = 40
"""Characters before a number, and half as many after it, in which a word that says what it is counts."""


def phones(text: str) -> Iterator[tuple[int, int]]:
    """(begin, end) of each number in a text.

    With a country code a valid number is one. A national number has to be valid in one of the regions, and either be
    written in groups or stand after a word such as `phone`; one after a word such as `order` is none.
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
    said = list(_WORDS.finditer(before))
    other = list(_OTHER.finditer(before))
    if other and (not said or other[-1].start() > said[-1].start()):
        return False
    if said or _WORDS.search(after):
        return True
    grouped = re.fullmatch(r"\(?0?\d{2,4}\)?(?:[ .\-/]+\d{2,4}){2,5}", given) is not None
    other_form = re.fullmatch(r"\d{4}([-./ ])\d{1,2}\1\d{1,2}|\d{3}-\d\d-\d{4}", given)  # a date; as a US number's
    return grouped and not other_form
