"""Prefix beam search over a CTC model's frames, with a word n-gram and hot words (Hannun et al., arXiv:1408.2873)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .config import CtcEvaluate
from .ngram import END, History, NGram
from .spelling import Labels

Scores = npt.NDArray[np.float32]

_FLOOR = -12.0
"""Labels of a frame with a smaller log-probability are not tried, but for the best."""


@dataclass(eq=False)
class Prefix:
    """Labels without blanks and repetitions, one of those that the search follows.

    Args:
        label: the last one; None: there is none.
        before: the prefix without it.
        word: letters of the word that is not finished.
        history: finished words that the language model looks at.
        score: of language model and hot words for the finished words, in nats.
        hope: what the unfinished word earns as the begin of a hot word.
        longer: prefixes with one label more.
    """

    label: int | None
    before: Prefix | None
    word: str
    history: History
    score: float
    hope: float = 0.0
    longer: dict[int, Prefix] = field(default_factory=dict)

    @property
    def labels(self) -> list[int]:
        found: list[int] = []
        at: Prefix | None = self
        while at is not None and at.label is not None:
            found.append(at.label)
            at = at.before
        return found[::-1]


class BeamSearch:
    """The likeliest text of a CTC model's frames.

    Args:
        labels: of the model.
        size: number of its labels.
        section: number of beams, language model, hot words.
        alone: whether each label is a word, as in languages without spaces.
    """

    def __init__(self, labels: Labels, size: int, section: CtcEvaluate, alone: bool = False):
        self.labels, self.section, self.alone = labels, section, alone
        self.lm = NGram(section.lm) if section.lm else None
        self.pieces = [labels.piece(label) for label in range(size)]
        self.hotwords = {word for text in section.hotwords for word in labels.spell(text).split()}
        self._begins = {word[:end]: end / len(word) for word in self.hotwords for end in range(1, len(word) + 1)}

    def __call__(self, scores: Scores) -> str:
        """The text.

        Args:
            scores: log-probabilities [T, V].
        """
        best = self.search(scores)
        found: list[int] = []
        for label in best.labels:  # between equal labels a blank, which decoding takes out
            found += [self.labels.blank, label] if found and found[-1] == label else [label]
        return self.labels.decode(found)

    def search(self, scores: Scores) -> Prefix:
        """The best prefix at the end."""
        root = Prefix(None, None, "", self.lm.start if self.lm else (), 0.0)
        beams: dict[Prefix, tuple[float, float]] = {root: (0.0, -math.inf)}  # ending in a blank, in the last label
        for frame in scores:
            tried = np.flatnonzero(frame >= min(_FLOOR, float(frame.max()))).tolist()
            grown: dict[Prefix, tuple[float, float]] = {}
            for prefix, ends in beams.items():
                self._grow(grown, prefix, ends, frame, tried)
            ranked = sorted(grown, key=lambda one: -(float(np.logaddexp(*grown[one])) + one.score + one.hope))
            beams = {prefix: grown[prefix] for prefix in ranked[: self.section.num_beams]}
        return max(beams, key=lambda one: float(np.logaddexp(*beams[one])) + self._finished(one))

    def _grow(
        self,
        grown: dict[Prefix, tuple[float, float]],
        prefix: Prefix,
        ends: tuple[float, float],
        frame: Scores,
        tried: list[int],
    ) -> None:
        """Add what a prefix becomes with one frame more, by each of the labels tried."""
        ends_blank, ends_label = ends
        both = float(np.logaddexp(ends_blank, ends_label))
        for label in tried:
            score = float(frame[label])
            if label == self.labels.blank:
                _add(grown, prefix, both + score, -math.inf)
            elif label != prefix.label:
                _add(grown, self._longer(prefix, label), -math.inf, both + score)
            else:
                _add(grown, prefix, -math.inf, ends_label + score)
                if ends_blank > -math.inf:
                    _add(grown, self._longer(prefix, label), -math.inf, ends_blank + score)

    def _longer(self, prefix: Prefix, label: int) -> Prefix:
        if label not in prefix.longer:
            prefix.longer[label] = self._extended(prefix, label)
        return prefix.longer[label]

    def _extended(self, prefix: Prefix, label: int) -> Prefix:
        piece = self.pieces[label]
        text, word, history, score = piece.strip(), prefix.word, prefix.history, prefix.score
        if word and (self.alone or piece.startswith(" ")):
            more, history = self._word(history, word)
            word, score = "", score + more
        word += text
        if word and text and piece.endswith(" "):
            more, history = self._word(history, word)
            word, score = "", score + more
        return Prefix(label, prefix, word, history, score, self.section.hotword_weight * self._begins.get(word, 0.0))

    def _word(self, history: History, word: str) -> tuple[float, History]:
        """(what a finished word earns, the words that are finished then)."""
        earned = self.section.hotword_weight if word in self.hotwords else 0.0
        if self.lm is None:
            return earned, history
        score, history = self.lm.score(history, word)
        return earned + self.section.lm_weight * score + self.section.word_bonus, history

    def _finished(self, prefix: Prefix) -> float:
        """Language model and hot words if the text ends here."""
        score, history = prefix.score, prefix.history
        if prefix.word:
            more, history = self._word(history, prefix.word)
            score += more
        return score + (self.section.lm_weight * self.lm.score(history, END)[0] if self.lm else 0.0)


def _add(grown: dict[Prefix, tuple[float, float]], prefix: Prefix, blank: float, label: float) -> None:
    old = grown.get(prefix)
    if old is None:
        grown[prefix] = blank, label
    else:
        grown[prefix] = float(np.logaddexp(old[0], blank)), float(np.logaddexp(old[1], label))
