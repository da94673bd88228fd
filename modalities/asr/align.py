"""Training segments out of long recordings with transcripts, by aligning the text to a CTC model's frames."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.table import Table
from torch import Tensor

from ...common.console import console, progress
from ...common.errors import BadExample, DataError, missing_extra
from . import audio, manifest
from .processing import check_alignable
from .segments_file import SegmentsFile
from .text import is_unsegmented, words
from .utterance import Utterance

PAD = 0.3
"""Most audio kept before the first and after the last word of a segment, in seconds; of a shorter pause, its half."""
CONTEXT = 2.0
"""Audio heard on both sides of a window, in seconds."""


@dataclass(frozen=True)
class Settings:
    """What is aligned, and how.

    Args:
        data: manifest of recordings with transcripts.
        model: checkpoint of `asr.ctc`, or directory of a CTC model.
        output: JSONL file to write.
        split: of the data.
        language: of rows that name none.
        channel: of files with several: `first`, `mean` or an index.
        max_seconds: longest segment.
        min_confidence: segments below it are left out, 0 to 1.
        window: audio that the model hears at once, in seconds.
    """

    data: str
    model: str
    output: Path
    split: str | None = None
    language: str | None = None
    channel: str | int = "mean"
    max_seconds: float = 20.0
    min_confidence: float = 0.0
    window: float = 30.0


@dataclass(frozen=True)
class Word:
    """A word as it is written, with what is aligned to it.

    Args:
        text: as the transcript has it, with what follows that the model can't write.
        start: in seconds from the recording's start.
        end: likewise.
        score: summed log-probability of its labels over its frames.
        frames: number of these frames.
    """

    text: str
    start: float
    end: float
    score: float
    frames: int


@dataclass
class Report:
    """What became of the recordings.

    Args:
        recordings: read.
        aligned: of them, with segments.
        segments: written.
        seconds: audio of these.
        unsure: segments left out for their confidence.
        failed: recordings that could not be aligned, by reason.
        named: some of these in full.
    """

    recordings: int = 0
    aligned: int = 0
    segments: int = 0
    seconds: float = 0.0
    unsure: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    named: list[str] = field(default_factory=list)


def align(settings: Settings) -> Report:
    """Write segments (`audio, start, end, text, confidence` and the row's other fields) to `settings.output`.

    What is finished is on disk: a killed run goes on, and one that is repeated takes up what failed.

    Raises:
        LuthierError: the model or the data as a whole can't be used, or the output is of other settings.
    """
    task = _task(settings)
    report, output = Report(), SegmentsFile(settings.output, asdict(settings))
    with progress("aligning", "recordings") as show, output:
        for item in manifest.utterances(settings.data, settings.split):
            report.recordings += 1
            try:
                done = output.done(item) or output.write(item, *_segments(task, _usable(item), settings))
            except BadExample as error:
                report.failed[error.reason] += 1
                report.named.append(str(error))
            else:
                report.aligned += 1
                for name in ("segments", "seconds", "unsure"):
                    setattr(report, name, getattr(report, name) + done[name])
            show(report.recordings, None)
    return report


def show(settings: Settings, report: Report) -> None:
    """Print a report."""
    table = Table("aligned", "number")
    for name, value in asdict(report).items():
        if name not in ("failed", "named"):
            table.add_row(name, f"{value:,.0f}")
    for reason, count in report.failed.items():
        table.add_row(f"failed: {reason}", str(count))
    console.print(table)
    for line in report.named[:5]:
        console.print(line, highlight=False, markup=False)
    console.print(f"written: {settings.output}", highlight=False)


def _task(settings: Settings) -> Any:
    """The `asr.ctc` task of a checkpoint, or of a directory in transformers' form."""
    from ...common.evaluation.saved import device
    from ...common.reading import build, load
    from .ctc.task import Task

    folder = Path(os.path.realpath(settings.model))
    if (folder / "recipe.yaml").is_file():
        recipe = load(folder / "recipe.yaml")
        if recipe.task.kind != "asr.ctc":
            problem = "only a CTC model can align"
            raise DataError(problem, where=folder, given=recipe.task.kind, expected="asr.ctc")
        task = Task(recipe, folder / "model")  # type: ignore[arg-type]
    else:
        tree = {
            "task": {"kind": "asr.ctc"},
            "model": {"path": settings.model},
            "data": {"train": settings.data},
            "output": str(settings.output),
        }
        recipe = build(tree, "luthier align")
        task = Task(recipe)  # type: ignore[arg-type]
    return task.to(device(recipe)).eval()


def _usable(item: Utterance | BadExample) -> Utterance:
    if isinstance(item, BadExample):
        raise item
    if callable(item.audio):
        problem, do = "the audio is inside of a data set, and segments name files", "write it into files"
        raise BadExample("no_file", problem, where=item.where, do=do)
    return item


# ---------------------------------------------------------------------------------------------- one recording


def _segments(task: Any, utterance: Utterance, settings: Settings) -> tuple[list[dict[str, Any]], int]:
    """(rows of a recording, segments left out for their confidence)."""
    hearing, language = task.processing.hearing, utterance.language or settings.language
    wave = audio.read(utterance, hearing.rate, settings.channel)  # type: ignore[arg-type]
    seconds = len(wave) / hearing.rate
    spoken = aligned(task, wave, utterance, language, settings.window)
    rows, unsure = [], 0
    for group, start, end in padded(cut(spoken, settings.max_seconds), seconds):
        sure = math.exp(sum(word.score for word in group) / max(1, sum(word.frames for word in group)))
        if sure < settings.min_confidence:
            unsure += 1
            continue
        glue = "" if is_unsegmented(language) else " "
        fields = {"language": language, "speaker": utterance.speaker, "channel": utterance.channel}
        rows.append(
            {
                "audio": os.path.abspath(str(utterance.audio)),
                "text": glue.join(word.text for word in group),
                "start": round(utterance.start + start, 3),
                "end": round(utterance.start + end, 3),
                "confidence": round(sure, 4),
                **{name: value for name, value in fields.items() if value is not None},
                **{name: value for name, value in utterance.extra.items() if name != "confidence"},
            }
        )
    return rows, unsure


@torch.no_grad()
def emissions(task: Any, wave: audio.Wave, window: float) -> Tensor:
    """Log-probabilities [T, V] of a recording of any length, run in windows that overlap."""
    from .ctc.config import StreamSection
    from .ctc.model import run
    from .extractor import batch

    hearing, parts = task.processing.hearing, []
    section = StreamSection(chunk_seconds=window, left_seconds=CONTEXT, right_seconds=CONTEXT)
    for piece in hearing.pieces(len(wave), section):
        features, lengths = batch([hearing(wave[piece.first : piece.last])], hearing.raw)
        logits, frames = run(task.speech, features.to(task.device), lengths.to(task.device))
        parts.append(logits[0, piece.begin : int(frames[0]) if piece.end is None else piece.end].float())
    return torch.cat(parts).log_softmax(-1).cpu()


def aligned(task: Any, wave: audio.Wave, utterance: Utterance, language: str | None, window: float) -> list[Word]:
    """The words of a recording's transcript with their times.

    Raises:
        BadExample: `text_not_in_vocabulary` (nothing can be written), `too_short_for_ctc`, `too_long_to_align`.
    """
    try:
        from torchaudio.functional import forced_align, merge_tokens  # type: ignore[import-untyped]
    except ImportError as error:
        raise missing_extra("torchaudio", "align") from error
    labels = task.processing.labels
    written = [(text, labels.known(text)) for text in _raw_words(utterance.text, language)]
    ids, owners = _joined(written, None if is_unsegmented(language) else labels.space)
    if not ids:
        problem = "the model's vocabulary can write nothing of the text"
        raise BadExample("text_not_in_vocabulary", problem, where=utterance.where, given=utterance.text[:80])
    scores = emissions(task, wave, window)
    check_alignable(utterance, ids, len(scores))
    _check_memory(utterance, len(scores), len(ids))
    path, found = forced_align(scores[None], torch.tensor([ids], dtype=torch.int32), blank=labels.blank)
    spans = merge_tokens(path[0], found[0], blank=labels.blank)
    seconds = task.processing.hearing.samples_per_frame / task.processing.hearing.rate
    placed: dict[int, list[Any]] = {}
    for span, owner in zip(spans, owners, strict=True):
        if owner is not None:
            placed.setdefault(owner, []).append(span)
    words_found: list[Word] = []
    before = ""
    glue = "" if is_unsegmented(language) else " "
    for number, (text, _) in enumerate(written):
        if number in placed:
            mine = placed[number]
            score = sum(span.score * len(span) for span in mine)
            frames = sum(len(span) for span in mine)
            start, end = mine[0].start * seconds, mine[-1].end * seconds
            words_found.append(Word(before + text, start, end, score, frames))
            before = ""
        elif words_found:  # what the model can't write stays with the word before it
            last = words_found[-1]
            words_found[-1] = Word(last.text + glue + text, last.start, last.end, last.score, last.frames)
        else:
            before += text + glue
    return words_found


def _raw_words(text: str, language: str | None) -> list[str]:
    return words(" ".join(text.split()), language)


def _joined(written: Sequence[tuple[str, tuple[int, ...]]], space: int | None) -> tuple[list[int], list[int | None]]:
    """(labels of a whole text, for each the number of its word; None for a space)."""
    ids: list[int] = []
    owners: list[int | None] = []
    for number, (_, labels) in enumerate(written):
        if labels and ids and space is not None:
            ids.append(space)
            owners.append(None)
        ids += labels
        owners += [number] * len(labels)
    return ids, owners


def _check_memory(utterance: Utterance, frames: int, labels: int) -> None:
    """torchaudio keeps 2 bits for each frame and state, of which there are two a label."""
    needed = 2 * (2 * labels + 2) * frames / 8
    room = psutil.virtual_memory().available / 2
    if needed > room:
        raise BadExample(
            "too_long_to_align",
            "the recording and its text need too much memory to be aligned at once",
            where=utterance.where,
            given=f"{needed / 1e9:.1f} GB for {frames} frames and {labels} labels",
            expected=f"at most {room / 1e9:.1f} GB",
            do="cut the recording and its text into parts",
        )


# ---------------------------------------------------------------------------------------------- segments


def cut(spoken: Sequence[Word], longest: float) -> list[list[Word]]:
    """Words in segments of at most `longest` seconds, cut where the pause is longest. A longer word stays whole."""
    found: list[list[Word]] = []
    waiting = [list(spoken)] if spoken else []
    while waiting:
        group = waiting.pop()
        if group[-1].end - group[0].start <= longest or len(group) == 1:
            found.append(group)
            continue
        at = max(range(1, len(group)), key=lambda number: group[number].start - group[number - 1].end)
        waiting += [group[at:], group[:at]]
    return found


def padded(groups: Sequence[list[Word]], seconds: float) -> Iterator[tuple[list[Word], float, float]]:
    """Segments with some of the pauses around them: (words, start, end), never overlapping.

    Args:
        groups: words of each segment, in order.
        seconds: length of the recording.
    """
    for number, group in enumerate(groups):
        before = groups[number - 1][-1].end if number else -math.inf
        after = groups[number + 1][0].start if number + 1 < len(groups) else math.inf
        start, end = group[0].start, group[-1].end
        start = max(0.0, start - min(PAD, max(0.0, start - before) / 2))
        yield group, start, min(seconds, end + min(PAD, max(0.0, after - end) / 2))
