"""The samples of a run, as a page shows them: speech, pictures, answers, what was found, and anything else as text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..common.pages.media import Media
from .aligned import Piece, aligned
from .runs import Run

MOST = 16
"""Samples of one kind on a page."""
FOUND = re.compile(r"(?P<score>-?[\d.]+) (?P<mark>[+-]) (?P<text>.*)", re.DOTALL)


@dataclass
class Card:
    """One sample at all steps.

    Args:
        title: where it comes from.
        facts: what stays the same: prompt, reference.
        sound: address of what is heard.
        steps: (step, pieces of the answer, further values) of each evaluation, the newest first.
    """

    title: str
    facts: dict[str, str] = field(default_factory=dict)
    sound: str | None = None
    steps: list[tuple[int, list[Piece], dict[str, Any]]] = field(default_factory=list)


@dataclass
class Samples:
    """Those of one run.

    Args:
        texts: of speech and answers.
        pictures: (title, [(step, address)]) of each prompt.
        found: (query, [(score, relevant, text)]) of the newest evaluation.
        rest: samples of other forms, of the newest evaluation.
        rollouts: (step, prompt, completions) of a training on its own answers.
    """

    texts: list[Card] = field(default_factory=list)
    pictures: list[tuple[str, list[tuple[int, str | None]]]] = field(default_factory=list)
    found: list[tuple[str, list[tuple[float, bool, str]]]] = field(default_factory=list)
    rest: list[dict[str, Any]] = field(default_factory=list)
    rollouts: list[tuple[int, str, list[dict[str, Any]]]] = field(default_factory=list)

    @property
    def compared(self) -> bool:
        """Whether a text is shown against its reference."""
        return any("reference" in card.facts for card in self.texts)

    def __bool__(self) -> bool:
        return bool(self.texts or self.pictures or self.found or self.rest or self.rollouts)


def samples(run: Run, media: Media) -> Samples:
    """What a run has kept for reading."""
    shown = Samples(rollouts=rollouts(run.folder))
    cards: dict[str, Card] = {}
    pictures: dict[str, list[tuple[int, str | None]]] = {}
    for step, kept in reversed(run.samples):
        newest = step == run.samples[-1][0]
        for number, sample in enumerate(kept[:MOST]):
            if "picture" in sample:
                beside = f" (left: {sample['left']})" if "left" in sample else ""
                title = f"{sample.get('prompt', number)}{beside}"
                file = run.folder / "samples" / Path(str(sample["picture"])).name
                pictures.setdefault(title, []).insert(0, (step, media.file(file)))
            elif "hypothesis" in sample or "answer" in sample:
                _add(cards, f"{sample.get('where', number)}", step, sample, media)
            elif newest and "query" in sample:
                shown.found.append((str(sample["query"]), _found(sample)))
            elif newest:
                shown.rest.append(sample)
    shown.texts, shown.pictures = list(cards.values()), list(pictures.items())
    return shown


def _add(cards: dict[str, Card], title: str, step: int, sample: dict[str, Any], media: Media) -> None:
    answer, reference = str(sample.get("hypothesis", sample.get("answer"))), sample.get("reference")
    if title not in cards:
        card = cards[title] = Card(title)
        card.facts = {name: str(sample[name]) for name in ("prompt", "reference") if sample.get(name) is not None}
        if isinstance(heard := sample.get("audio"), dict):
            card.sound = media.sound(Path(str(heard.get("path"))), float(heard.get("start") or 0.0), heard.get("end"))
    pieces = [Piece("same", answer, answer)] if reference is None else aligned(str(reference), answer)
    known = ("hypothesis", "answer", "reference", "prompt", "where", "audio")
    cards[title].steps.append((step, pieces, {name: value for name, value in sample.items() if name not in known}))


def _found(sample: dict[str, Any]) -> list[tuple[float, bool, str]]:
    """What was found for a query: `0.874 + text`, with a plus for what is relevant."""
    hits = [FOUND.fullmatch(str(value)) for name, value in sample.items() if name.startswith("found ")]
    return [(float(hit["score"]), hit["mark"] == "+", hit["text"]) for hit in hits if hit]


def rollouts(folder: Path, prompts: int = 2, most: int = 4) -> list[tuple[int, str, list[dict[str, Any]]]]:
    """Some prompts of the first, the middle and the last rollout, with completions from the best to the worst."""
    files = sorted((folder / "rollouts").glob("rollout-*.parquet"))
    if not files:
        return []
    from pyarrow import parquet

    shown = []
    for file in dict.fromkeys((files[0], files[len(files) // 2], files[-1])):
        rows = parquet.read_table(file).to_pylist()
        by_prompt: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
        for row in rows:
            by_prompt.setdefault((row.get("where"), row["prompt"]), []).append(row)
        for (_, prompt), own in list(by_prompt.items())[:prompts]:
            own.sort(key=lambda row: -_sortable(row["reward"]))
            shown.append((int(own[0]["step"]), str(prompt), [_completion(row) for row in _spread(own, most)]))
    return shown


def _sortable(reward: float | None) -> float:
    return float("-inf") if reward is None or reward != reward else reward


def _completion(row: dict[str, Any]) -> dict[str, Any]:
    parts = {name: value for name, value in row.items() if name.startswith("reward/")}
    return {
        "text": str(row["completion"]),
        "reward": row["reward"],
        "parts": parts if len(parts) > 1 else {},
        "advantage": row.get("advantage"),
        "finished": row.get("finished", True),
        "error": row.get("error"),
    }


def _spread(rows: Sequence[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """At most so many, from the first to the last."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(at * (len(rows) - 1) / (most - 1))] for at in range(most)]
