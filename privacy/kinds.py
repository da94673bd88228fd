"""Kinds of personal data and secrets that have a form, each found by a pattern and a check.

Numbers with check digits are checked by python-stdnum. The patterns don't use word boundaries, as letters of other
scripts may stand right beside a number. The order is that of precedence: what an earlier kind has taken is no other.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date

from stdnum import iban, luhn
from stdnum.cn import ric
from stdnum.de import idnr
from stdnum.fr import nir
from stdnum.it import codicefiscale
from stdnum.us import ssn

from .secrets import SECRETS, is_jwt, is_secret

_ALONE = r"(?<![A-Za-z0-9]){}(?![A-Za-z0-9])"
"""Not part of a longer word or number in Latin letters."""
_NUMBER = r"(?<![A-Za-z0-9.,+-]){}(?![A-Za-z0-9]|[.,-]\d)"
"""Nor of a decimal number or a longer one with separators."""

_SPACED = r"[ ./-]?".join(["{}"] * 7)
_LETTERS = "A-Za-zÀ-ÖØ-öø-ž"
"""Latin letters; those of other scripts may stand right before an address."""
_AT, _DOT = r"(?:@| ?[(\[]at[)\]] ?)", r"(?:\.| ?[(\[]dot[)\]] ?)"

_ISSUERS = re.compile(r"4|5[1-5]|2[2-7]|3[47]|6(?:011|4[4-9]|5|2)|3(?:0[0-5]|[68])|35(?:2[89]|[3-8])")
"""First digits of cards: Visa, Mastercard, American Express, Discover, UnionPay, Diners, JCB."""
_CARD_LENGTHS = {"4": (13, 16, 19), "3": (14, 15, 16), "5": (16,), "2": (16,), "6": (16, 17, 18, 19)}


@dataclass(frozen=True)
class Kind:
    """A kind of value.

    Args:
        name: of its placeholders, `<NAME_1>`.
        pattern: what it looks like; if it has a group `value`, that is the value.
        check: whether what looks like it is it.
    """

    name: str
    pattern: re.Pattern[str]
    check: Callable[[str], bool] = lambda value: True


def _digits(value: str) -> str:
    """A number without what it is grouped by."""
    return re.sub(r"[ ./-]", "", value).upper()


def _is_card(value: str) -> bool:
    digits = _digits(value)
    if not _ISSUERS.match(digits) or len(digits) not in _CARD_LENGTHS[digits[0]] or len(set(digits)) == 1:
        return False
    return bool(luhn.is_valid(digits))


def _is_address(value: str) -> bool:
    """A machine's address, but for those that every machine has; four small numbers are rather those of a version."""
    try:
        found = ipaddress.ip_address(value.replace("[.]", "."))
    except ValueError:
        return False
    if found.is_loopback or found.is_unspecified:
        return False
    if found.version == 6:
        return value.count(":") > 2
    return found.packed[0] == 10 or max(found.packed) > 31


def _is_chinese(value: str) -> bool:
    """Check digit and birth date; the list of places that stdnum has is not whole."""
    digits = _digits(value)
    born = digits[6:14]
    try:
        real = date(1900, 1, 1) <= date(int(born[:4]), int(born[4:6]), int(born[6:])) <= date.today()
    except ValueError:
        return False
    return real and bool(ric.calc_check_digit(digits) == digits[-1])


def _is_french(value: str) -> bool:
    """Check digits and month of birth; months from 20 on stand for unknown ones."""
    digits = _digits(value)
    return bool(nir.is_valid(digits)) and (1 <= int(digits[3:5]) <= 12 or 20 <= int(digits[3:5]) <= 99)


KINDS: tuple[Kind, ...] = (
    Kind("PRIVATE_KEY", re.compile(r"-----BEGIN ([A-Z0-9 ]*)PRIVATE KEY( BLOCK)?-----.*?-----END \1PRIVATE KEY\2?-----",
                                   re.DOTALL)),
    Kind("JWT", re.compile(_ALONE.format(r"eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{16,}")), is_jwt),
    *(Kind(name, re.compile(_ALONE.format(pattern))) for name, pattern in SECRETS.items()),
    Kind("EMAIL", re.compile(
        rf"(?<![{_LETTERS}\d._%+-])[{_LETTERS}\d][{_LETTERS}\d._%+-]{{0,63}}{_AT}(?:[{_LETTERS}\d](?:[{_LETTERS}\d-]{{0,61}}"
        rf"[{_LETTERS}\d])?{_DOT})+[A-Za-z]{{2,24}}(?![{_LETTERS}\d-]|\.[{_LETTERS}\d])"
    )),
    Kind("IBAN", re.compile(
        _ALONE.format(r"(?i:[A-Z]{2}\d{2}(?:[ -]?[A-Z0-9]{4}){2,7}(?:[ -]?[A-Z0-9]{1,3})?)")
    ), lambda value: bool(iban.is_valid(_digits(value)))),
    Kind("CARD", re.compile(_NUMBER.format(r"\d(?:[ .-]?\d){12,18}")), _is_card),
    Kind("IT_FISCAL_CODE", re.compile(
        _ALONE.format(r"(?i:[A-Z]{3} ?[A-Z]{3} ?[\dLMNP-V]{2}[A-EHLMPRST][\dLMNP-V]{2} ?[A-Z][\dLMNP-V]{3} ?[A-Z])")
    ), lambda value: bool(codicefiscale.is_valid(_digits(value)))),
    Kind("FR_NIR", re.compile(_NUMBER.format(_SPACED.format(r"[1-478]", r"\d{2}", r"\d{2}", r"(?:\d{2}|2[AB])",
                                                            r"\d{3}", r"\d{3}", r"\d{2}"))), _is_french),
    Kind("CN_ID", re.compile(_NUMBER.format(r"[1-9]\d{5} ?\d{8} ?\d{3}[\dXx]")), _is_chinese),
    Kind("DE_TAX_ID", re.compile(_NUMBER.format(r"[1-9]\d(?:[ ./-]?\d{3}){3}")),
         lambda value: bool(idnr.is_valid(_digits(value)))),
    Kind("US_SSN", re.compile(_NUMBER.format(r"\d{3}([ -])\d{2}\1\d{4}")),
         lambda value: bool(ssn.is_valid(_digits(value)))),
    Kind("US_SSN", re.compile(r"(?i:\bssn|social security)\D{0,20}(?P<value>\d{9})(?!\d)", re.ASCII), ssn.is_valid),
    Kind("UK_NINO", re.compile(_ALONE.format(
        r"(?i:(?!BG|GB|KN|NK|NT|TN|ZZ)[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z](?:[ -]?\d{2}){3}[ -]?[A-D])"
    ))),
    Kind("IP", re.compile(
        r"(?:(?<=//)|(?<![\w.:/-]))(?<![vV]ersion )(?<![vV]ersion: )(?<![=~]=)(?:\d{1,3}(?:(?:\.|\[\.\])\d{1,3}){3}"
        r"|(?:[0-9A-Fa-f]{0,4}:){3,7}[0-9A-Fa-f]{0,4})(?![\w:]|\.\d)",
        re.ASCII,
    ), _is_address),
    Kind("SECRET", re.compile(
        r"(?i:api[_ -]?key|secret(?:[_ -]?key)?|access[_ -]?key|token(?!iz)|passw(?:or)?d|passwort|pwd|bearer"
        r"|credentials?|密码|密钥|mot de passe|parola d'ordine)\w{0,12}"
        r"[\"']?\s{0,3}(?:[=:,]|\bis\b|为|è|est|ist| )\s{0,3}[\"'`]?"
        r"(?P<value>[^\s\"'`,;，。；]{10,200})"
    ), is_secret),
)  # fmt: skip
"""All of them, but phones (`phones`) and names (`names`)."""
