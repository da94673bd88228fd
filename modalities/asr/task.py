"""What every speech recogniser does with its transcripts: records, scores, samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ...common import task
from .metrics import Scored, score
from .utterance import Utterance


class SpeechTask(task.Task):
    """A speech recogniser whose predictions are `Scored` records. A subclass defines `loss`, `predict` and
    `save_pretrained`."""

    metrics: ClassVar[dict[str, str]] = {"wer": "min", "wer_raw": "min", "cer": "min", "cer_raw": "min", "loss": "min"}

    recipe: Any

    def record(self, utterance: Utterance, hypothesis: str, language: str | None) -> Scored:
        """A transcript beside its reference.

        Args:
            utterance: what was transcribed.
            hypothesis: the transcript.
            language: that of the text, which decides how it is normalised.
        """
        fields = {"source": utterance.source, "speaker": utterance.speaker, **utterance.extra}
        fields = {name: fields.get(name) for name in self.recipe.evaluate.slices if fields.get(name) is not None}
        return Scored(utterance.text, hypothesis, language, utterance.where, utterance.duration, fields)

    @property
    def spelling(self) -> Mapping[str, str] | None:
        """Spellings that count as one another, where the model brings such a list."""
        return None

    def score(self, records: Sequence[Any]) -> dict[str, Any]:
        return score(records, self.recipe.evaluate.slices, self.spelling)

    def samples(self, records: Sequence[Any], number: int) -> list[dict[str, Any]]:
        step = max(1, len(records) // max(1, number))
        return [
            {"where": item.where, "reference": item.reference, "hypothesis": item.hypothesis}
            for item in records[::step][:number]
        ]
