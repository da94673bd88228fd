"""Rewards that compare an answer with a reference or look at its form; the comparisons are those of evaluations."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ... import scoring
from .answer import Answer, Scorer, each
from .config import Exact, Format, Json, Number, ReferenceSection, Regex


def inside(text: str, tag: str) -> str | None:
    """What stands in the last pair of a tag; None: there is none."""
    found = re.findall(rf"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>", text, re.DOTALL)
    return found[-1].strip() if found else None


def _said(answer: Answer, tag: str | None) -> str | None:
    """What counts of an answer; None: the tag is missing."""
    said = scoring.said(answer.completion)
    return said if tag is None else inside(said, tag)


def _compared(section: ReferenceSection, compare: Callable[[str, str], float]) -> Scorer:
    def score(answer: Answer) -> float:
        wanted = scoring.said(answer.reference(section.reference))
        said = _said(answer, section.tag)
        return 0.0 if said is None else compare(said, wanted)

    return each(score)


def exact(section: Exact) -> Scorer:
    """See `config.Exact`."""
    return _compared(section, scoring.exact_match)


def number(section: Number) -> Scorer:
    """See `config.Number`. A comparison by math-verify that takes more than 5 s counts as wrong."""
    if section.by == "last_number":
        return _compared(section, scoring.numeric)
    scoring.needed("math_verify", "math-verify")
    return _compared(section, scoring.math_verify)


def regex(section: Regex) -> Scorer:
    """See `config.Regex`."""
    pattern = re.compile(section.pattern, re.MULTILINE)

    def score(answer: Answer) -> float:
        said = answer.completion if section.whole else scoring.said(answer.completion)
        if section.reference is None:
            return float(pattern.search(said) is not None)
        return scoring.regex(said, answer.reference(section.reference), pattern)

    return each(score)


def json(section: Json) -> Scorer:
    """See `config.Json`."""
    file = section.json_schema
    schema = None if file is None else scoring.load_schema(Path(file), "rewards.json_schema")
    check = partial(scoring.valid_json, reference="", schema=schema)

    def score(answer: Answer) -> float:
        said = _said(answer, section.tag)
        return 0.0 if said is None else check(said)

    return each(score)


def form(section: Format) -> Scorer:
    """See `config.Format`."""
    before = f"<{section.tags[0]}>" if section.opened else ""
    measure = _share if section.partial else _whole
    return each(lambda answer: measure(before + answer.completion, section.tags))


def _whole(text: str, tags: Sequence[str]) -> float:
    """Whether a text is these tags, each once and in order."""
    signs = [sign for tag in tags for sign in (f"<{tag}>", f"</{tag}>")]
    pattern = r"\s*".join(f"<{tag}>.*?</{tag}>" for tag in tags)
    once = all(text.count(sign) == 1 for sign in signs)
    return float(once and re.fullmatch(rf"\s*{pattern}\s*", text, re.DOTALL) is not None)


def _share(text: str, tags: Sequence[str]) -> float:
    """The share of the tags' openings and closings that stand exactly once."""
    signs = [sign for tag in tags for sign in (f"<{tag}>", f"</{tag}>")]
    return sum(text.count(sign) == 1 for sign in signs) / len(signs)
