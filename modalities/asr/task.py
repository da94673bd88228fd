"""What every speech recogniser does with its transcripts: records, scores, samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ...common import task
from ...common.evaluation.each import Each
from .long.join import joined
from .long.times import compared
from .metrics import Scored, each, score
from .utterance import Segment, Utterance


class SpeechTask(task.Task):
    """A speech recogniser whose predictions are `Scored` records. A subclass defines `loss`, `predict` and
    `save_pretrained`."""

    metrics: ClassVar[dict[str, str]] = {"wer": "min", "wer_raw": "min", "cer": "min", "cer_raw": "min", "loss": "min"}

    recipe: Any

    def record(
        self, utterance: Utterance, hypothesis: str, language: str | None, times: Sequence[Segment] = ()
    ) -> Scored:
        """A transcript beside its reference.

        Args:
            utterance: what was transcribed.
            hypothesis: the transcript.
            language: that of the text, which decides how it is normalised.
            times: words or stretches of the transcript with their times from the utterance's start, if they are known.
        """
        fields = {"source": utterance.source, "speaker": utterance.speaker, **utterance.extra}
        fields = {name: fields.get(name) for name in self.recipe.evaluate.slices if fields.get(name) is not None}
        whole = utterance.whole or utterance
        later = utterance.start - whole.start
        heard = tuple(Segment(time.start + later, time.end + later, time.text) for time in times)
        audio = (whole.audio, whole.start, whole.end) if isinstance(whole.audio, str) else None
        return Scored(
            whole.text, hypothesis, language, whole.where, whole.duration, fields, utterance.part, heard,
            whole.segments, audio,
        )  # fmt: skip

    @property
    def spelling(self) -> Mapping[str, str] | None:
        """Spellings that count as one another, where the model brings such a list."""
        return None

    def score(self, records: Sequence[Any]) -> dict[str, Any]:
        records = joined(records)
        return {**score(records, self.recipe.evaluate.slices, self.spelling), **compared(records)}

    def each(self, records: Sequence[Any]) -> list[Each]:
        return each(joined(records), self.recipe.evaluate.slices, self.spelling)

    def samples(self, records: Sequence[Any], number: int) -> list[dict[str, Any]]:
        records = joined(records)
        step = max(1, len(records) // max(1, number))
        return [item.shown for item in records[::step][:number]]
