"""Word and character error rates of a corpus: sums of errors over sums of words, never a mean of means."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...common.errors import DataError, missing_extra
from ...common.evaluation.each import Each
from .text import is_unsegmented, normalize, words
from .utterance import Segment

if TYPE_CHECKING:
    from jiwer import CharacterOutput, WordOutput

UNKNOWN = "unknown"
_WORST = 20
_SECONDS = ((1, "<1 s"), (3, "1-3 s"), (10, "3-10 s"), (20, "10-20 s"), (30, "20-30 s"))
_LONGEST = ">=30 s"
_BINS = [*(label for _, label in _SECONDS), _LONGEST, UNKNOWN]


@dataclass(frozen=True)
class Scored:
    """What was said and what was heard, both as raw text.

    Args:
        reference: the transcript as the source has it, never what a tokenizer made of it.
        hypothesis: the model's text; may be empty.
        language: code or English name; it decides how the text is normalised and what a word is.
        where: place in the source, `file:line`.
        duration: length of the audio in seconds.
        fields: other fields that a slice may name, such as `source` or `speaker`.
        part: number of the piece, from 0, and number of pieces, where a long recording is transcribed in pieces; the
            reference is that of the whole.
        times: words or stretches of the hypothesis with the times at which they are said, from the recording's start.
        segments: stretches of the reference with their times.
        audio: file of the recording, and begin and end in it in seconds (None: its end), if it is a file.
    """

    reference: str
    hypothesis: str
    language: str | None = None
    where: str = ""
    duration: float | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    part: tuple[int, int] = (0, 1)
    times: tuple[Segment, ...] = ()
    segments: tuple[Segment, ...] = ()
    audio: tuple[str, float, float | None] | None = None

    @property
    def shown(self) -> dict[str, Any]:
        """As a sample for reading and hearing."""
        heard = {"where": self.where, "reference": self.reference, "hypothesis": self.hypothesis}
        if self.audio is None:
            return heard
        path, start, end = self.audio
        return {**heard, "audio": {"path": path, "start": start, "end": end}}


@dataclass(frozen=True)
class _Errors:
    """Errors against a reference of `length` units. They add up."""

    insertions: int = 0
    deletions: int = 0
    substitutions: int = 0
    length: int = 0

    @property
    def total(self) -> int:
        return self.insertions + self.deletions + self.substitutions

    @property
    def rate(self) -> float:
        """Errors a unit; with no reference the number of insertions, as in jiwer, so that JSON can hold it."""
        return self.total / max(self.length, 1)

    def __add__(self, other: _Errors) -> _Errors:
        return _Errors(
            self.insertions + other.insertions,
            self.deletions + other.deletions,
            self.substitutions + other.substitutions,
            self.length + other.length,
        )


@dataclass(frozen=True)
class _Row:
    """The errors of one utterance in each of the four ways, and its normalised hypothesis."""

    item: Scored
    words: _Errors
    characters: _Errors
    words_raw: _Errors
    characters_raw: _Errors
    heard: str


def score(
    items: Sequence[Scored],
    slices: Sequence[str] = ("language", "duration"),
    spelling: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Error rates of a corpus, ready for JSON. The order of the items does not matter.

    `wer` and `cer` are of the normalised text (`text.normalize`), `wer_raw` and `cer_raw` of the text as it is; rates
    are fractions, 0.05 for 5 %. For an unsegmented language a word is a character. Character errors count the one
    space between two words, as `jiwer.cer` does, but no space in an unsegmented language. An empty hypothesis is all
    deletions, an empty reference all insertions. Counted by jiwer (minimal edit distance).

    Args:
        items: the utterances; each is normalised by its own language.
        slices: fields by which to split: `language`, `duration` (in bins of seconds), `where` or a key of `fields`.
            An utterance without the field counts under `unknown`.
        spelling: British to American spellings, see `text.normalize`.

    Returns:
        `wer, wer_raw, cer, cer_raw`; `insertions, deletions, substitutions, words` of the normalised words;
        `utterances, empty_hypotheses, empty_references` (empty: no word is left after normalising);
        `slices: {field: {value: {wer, wer_raw, cer, utterances, words}}}`;
        `worst`: up to 20 wrong utterances with the most errors, `{where, reference, hypothesis, wer, errors}`.

    Raises:
        DataError: there is no item; a rate of nothing would look like a perfect one.
    """
    if not items:
        raise DataError("no utterance to score", expected="at least one", do="look at what the evaluation data kept")
    rows = _rows(items, spelling)
    total = _sum(rows, "words")
    return {
        **_rates(rows),
        "cer_raw": _sum(rows, "characters_raw").rate,
        "insertions": total.insertions,
        "deletions": total.deletions,
        "substitutions": total.substitutions,
        "empty_hypotheses": sum(row.heard == "" for row in rows),
        "empty_references": sum(row.words.length == 0 for row in rows),
        "slices": {name: _slice(rows, name) for name in slices},
        "worst": _worst(rows),
    }


def each(
    items: Sequence[Scored],
    slices: Sequence[str] = ("language", "duration"),
    spelling: Mapping[str, str] | None = None,
) -> list[Each]:
    """What each utterance adds to the rates of `score`: its errors, and the words or characters of its reference."""
    found = []
    for row in _rows(items, spelling):
        errors = {"wer": row.words, "wer_raw": row.words_raw, "cer": row.characters, "cer_raw": row.characters_raw}
        parts = {name: (float(one.total), float(one.length)) for name, one in errors.items()}
        found.append(Each(row.item.where, parts, {name: _value(row.item, name) for name in slices}))
    return found


def alignment(reference: str, hypothesis: str, language: str | None = None) -> str:
    """The differences in one line, as wdiff marks them: `the [-cat-] {+dog+} sat`. The texts are taken as they are."""
    join = _joiner(language)
    output = _jiwer().process_words(" ".join(words(reference, language)), " ".join(words(hypothesis, language)))
    said, heard = output.references[0], output.hypotheses[0]
    parts = []
    for chunk in output.alignments[0]:
        old = join(said[chunk.ref_start_idx : chunk.ref_end_idx])
        new = join(heard[chunk.hyp_start_idx : chunk.hyp_end_idx])
        if chunk.type == "equal":
            parts.append(old)
            continue
        parts += [f"[-{old}-]"] * bool(old) + [f"{{+{new}+}}"] * bool(new)
    return " ".join(parts)


def _rows(items: Sequence[Scored], spelling: Mapping[str, str] | None) -> list[_Row]:
    languages = [item.language for item in items]
    references = [normalize(item.reference, item.language, spelling) for item in items]
    hypotheses = [normalize(item.hypothesis, item.language, spelling) for item in items]
    normal = _count(references, hypotheses, languages)
    raw = _count([item.reference for item in items], [item.hypothesis for item in items], languages)
    return [_Row(*columns) for columns in zip(items, *normal, *raw, hypotheses, strict=True)]


def _count(
    references: list[str], hypotheses: list[str], languages: list[str | None]
) -> tuple[list[_Errors], list[_Errors]]:
    """Errors in words and in characters, one of each per pair of texts."""
    jiwer = _jiwer()
    joiners = [_joiner(language) for language in languages]
    said = [words(text, language) for text, language in zip(references, languages, strict=True)]
    heard = [words(text, language) for text, language in zip(hypotheses, languages, strict=True)]
    in_words = jiwer.process_words([" ".join(units) for units in said], [" ".join(units) for units in heard])
    in_characters = jiwer.process_characters(
        [join(units) for join, units in zip(joiners, said, strict=True)],
        [join(units) for join, units in zip(joiners, heard, strict=True)],
    )
    return _errors(in_words), _errors(in_characters)


def _errors(output: WordOutput | CharacterOutput) -> list[_Errors]:
    """jiwer gives counts of the whole list only; the alignments have them by utterance."""
    rows = []
    for reference, chunks in zip(output.references, output.alignments, strict=True):
        counts: defaultdict[str, int] = defaultdict(int)
        for chunk in chunks:
            spans = (chunk.ref_end_idx - chunk.ref_start_idx, chunk.hyp_end_idx - chunk.hyp_start_idx)
            counts[chunk.type] += max(spans)
        rows.append(_Errors(counts["insert"], counts["delete"], counts["substitute"], len(reference)))
    return rows


def _joiner(language: str | None) -> Callable[[Sequence[str]], str]:
    return ("" if is_unsegmented(language) else " ").join


def _sum(rows: Sequence[_Row], name: str) -> _Errors:
    return sum((getattr(row, name) for row in rows), start=_Errors())


def _rates(rows: Sequence[_Row]) -> dict[str, Any]:
    total = _sum(rows, "words")
    return {
        "wer": total.rate,
        "wer_raw": _sum(rows, "words_raw").rate,
        "cer": _sum(rows, "characters").rate,
        "utterances": len(rows),
        "words": total.length,
    }


def _slice(rows: Sequence[_Row], name: str) -> dict[str, dict[str, Any]]:
    groups: defaultdict[str, list[_Row]] = defaultdict(list)
    for row in rows:
        groups[_value(row.item, name)].append(row)
    order: Callable[[str], Any] | None = _BINS.index if name == "duration" else None
    return {value: _rates(groups[value]) for value in sorted(groups, key=order)}


def _value(item: Scored, name: str) -> str:
    if name == "duration":
        return _bin(item.duration)
    value = getattr(item, name) if name in ("language", "where") else item.fields.get(name)
    return UNKNOWN if value is None or value == "" else str(value)


def _bin(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    return next((label for limit, label in _SECONDS if seconds < limit), _LONGEST)


def _worst(rows: Sequence[_Row]) -> list[dict[str, Any]]:
    def rank(row: _Row) -> tuple[Any, ...]:
        item = row.item
        return -row.words.total, -row.words.rate, item.where, item.reference, item.hypothesis

    wrong = sorted((row for row in rows if row.words.total), key=rank)
    return [
        {
            "where": row.item.where,
            "reference": row.item.reference,
            "hypothesis": row.item.hypothesis,
            "wer": row.words.rate,
            "errors": row.words.total,
        }
        for row in wrong[:_WORST]
    ]


def words_output(reference: str, hypothesis: str) -> WordOutput:
    """jiwer's alignment of the words of two texts, taken as they are."""
    output: WordOutput = _jiwer().process_words(reference, hypothesis)
    return output


def _jiwer() -> Any:
    try:
        import jiwer
    except ImportError:
        raise missing_extra("jiwer", "asr") from None
    return jiwer
