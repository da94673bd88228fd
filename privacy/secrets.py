"""Keys and tokens of services, by the forms that their makers document, and values that look drawn at random."""

from __future__ import annotations

import base64
import json
import math
import re
from collections import Counter

SECRETS: dict[str, str] = {
    "AWS_KEY": r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z2-7]{16}",
    "GITHUB_TOKEN": r"(?:gh[pousr]_[A-Za-z0-9]{36,255}|github_pat_[A-Za-z0-9_]{40,255})",
    "SLACK_TOKEN": r"xox[abeprs]-[A-Za-z0-9-]{10,250}",
    "GOOGLE_KEY": r"AIza[A-Za-z0-9_-]{35}",
    "HUGGING_FACE_TOKEN": r"hf_[A-Za-z0-9]{34,}",
    "MODEL_SERVICE_KEY": r"sk-(?:proj-|ant-|svcacct-)?[A-Za-z0-9_-]{32,}",
    "STRIPE_KEY": r"[rs]k_live_[A-Za-z0-9]{16,}",
}
"""Names of placeholders, and the forms."""

BITS = 2.8
"""Bits a character (of the value's own letters) from which a value looks drawn at random."""

_CODE = re.compile(
    r"[(){}<>\[\]$%\\]|\.\.|://|^[\w.]+\.(?:com|org|py|js|md|json|txt|ya?ml)$|^(?:os|self|this|process|config)\."
)
_WORDS = re.compile(r"[a-z]+(?:[-_.][a-z]+)*|[A-Z]+(?:[-_.][A-Z]+)*|[A-Z]?[a-z]+(?:[A-Z][a-z]+)*")


def entropy(value: str) -> float:
    """Shannon entropy of a text's characters, in bits a character."""
    counts = Counter(value).values()
    return -sum(count / len(value) * math.log2(count / len(value)) for count in counts)


def is_secret(value: str) -> bool:
    """Whether what follows `key=` looks drawn at random: not code, not words, letters and digits, and much entropy."""
    value = value.rstrip(".!?:")
    if len(value) < 10 or _CODE.search(value) or _WORDS.fullmatch(value):
        return False
    mixed = any(one.isdigit() for one in value) and any(one.isalpha() for one in value)
    return mixed and value.isascii() and entropy(value) >= BITS


def is_jwt(value: str) -> bool:
    """Whether the first part of a token is the header of one: JSON that names its algorithm."""
    head = value.split(".")[0]
    try:
        found = json.loads(base64.urlsafe_b64decode(head + "=" * (-len(head) % 4)))
    except ValueError:
        return False
    return isinstance(found, dict) and "alg" in found
