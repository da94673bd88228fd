"""Supervised fine-tuning: the answers of conversations carry loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from ....common.data.processing import Batch
from ....common.evaluation.each import Part
from ....common.seeding import seed_batch
from ....common.task import Predicted
from .. import scoring
from ..causal import CausalTask, Told
from ..config import SCORES, score_name
from ..generate import Generated, generate
from .config import Config
from .processing import ChatProcessing


@dataclass(frozen=True)
class Answered(Told):
    """An example with what the model answers to its prompt.

    Args:
        prompt: what it was asked, as it reads it.
        reference: what it should answer.
        answer: what it answers.
        tokens: length of that.
        is_finished: whether it ended its answer by itself.
        scores: by name.
    """

    prompt: str = ""
    reference: str = ""
    answer: str = ""
    tokens: int = 0
    is_finished: bool = True
    scores: dict[str, float] = field(default_factory=dict)


class Task(CausalTask):
    """Fine-tunes a causal language model, or an adapter of it, on conversations."""

    metrics: ClassVar[dict[str, str]] = {**CausalTask.metrics, **dict.fromkeys(SCORES, "max")}

    recipe: Config
    processing: ChatProcessing

    def __init__(self, recipe: Config, weights: Path | None = None):
        section = recipe.evaluate.generate
        scores = {} if section is None else scoring.scores(section)  # first, as it may refuse the recipe
        super().__init__(recipe, weights)
        self._scores = scores

    @classmethod
    def make_processing(cls, recipe: Config, weights: Path | None = None) -> ChatProcessing:
        return ChatProcessing(recipe, weights)

    @classmethod
    def metrics_of(cls, recipe: Any) -> dict[str, str]:
        """Loss and accuracy, the benchmarks, and the scores of answers that the recipe asks for."""
        section = recipe.evaluate.generate
        names = [] if section is None else [score_name(given) for given in section.scores]
        return {**super().metrics_of(recipe), **dict.fromkeys(names, "max")}

    # ------------------------------------------------------------------ evaluation

    @torch.no_grad()
    def predict(self, batch: Batch) -> Predicted:
        """Loss and accuracy of each example, and the model's answer to its prompt if the recipe asks for it."""
        found = super().predict(batch)
        answers = self.answered(batch, found.records)
        found.records = [answers.get(row, told) for row, told in enumerate(found.records)]
        return found

    def answered(self, batch: Batch, told: Sequence[Told]) -> dict[int, Answered]:
        """The model's answers to the prompts of a batch, by row."""
        asked = [row for row, prompt in enumerate(batch.data["prompts"]) if prompt is not None]
        if not asked:
            return {}
        seed_batch(self.recipe.train.seed, batch.number)  # if answers are drawn, then the same each time
        return self._answers(batch.data, asked, told)

    def _answers(self, data: dict[str, Any], asked: Sequence[int], told: Sequence[Told]) -> dict[int, Answered]:
        section, tokenizer = self.recipe.evaluate.generate, self.processing.tokenizer
        assert section is not None  # without it nothing is asked
        prompts = [data["prompts"][row] for row in asked]
        ends = self.generation_config().eos_token_id or []
        generated = self.answers_of([prompt.ids for prompt in prompts], section.max_new_tokens, ends)
        found = {}
        for row, prompt, one in zip(asked, prompts, generated, strict=True):
            answer = str(tokenizer.decode(one.ids, skip_special_tokens=True)).strip()
            found[row] = Answered(
                **{**vars(told[row]), "where": data["where"][row]},
                prompt=str(tokenizer.decode(prompt.ids)),
                reference=prompt.reference,
                answer=answer,
                tokens=len(one.ids),
                is_finished=one.is_finished,
                scores={name: score(answer, prompt.reference, prompt.row) for name, score in self._scores.items()},
            )
        return found

    def answers_of(self, prompts: Sequence[np.ndarray], most: int, ends: Sequence[int]) -> list[Generated]:
        """What the model says after each prompt, at most so many tokens."""
        section = self.recipe.evaluate.generate
        assert section is not None
        section = section.model_copy(update={"max_new_tokens": most})
        return generate(self.causal, prompts, section, ends, self.processing.tokenizer.pad_token_id or 0)

    def means(self, records: Sequence[Any]) -> dict[str, Any]:
        """Beside loss and accuracy the mean scores of the answers; their number; the share of those that the model did
        not end within the tokens allowed; their mean length."""
        return {**super().means(records), **self.answer_means([one for one in records if isinstance(one, Answered)])}

    def parts(self, record: Any) -> dict[str, Part]:
        return {**super().parts(record), **(self.answer_parts(record) if isinstance(record, Answered) else {})}

    @staticmethod
    def answer_parts(answer: Answered) -> dict[str, Part]:
        """What one answer adds to those of `answer_means`."""
        return {name: (value, 1.0) for name, value in answer.scores.items()}

    def answer_means(self, answers: Sequence[Answered]) -> dict[str, Any]:
        """The means of answers; of none, nothing."""
        if not answers:
            return {}
        number = len(answers)
        scores = {name: sum(one.scores[name] for one in answers) / number for name in self._scores}
        return {
            **scores,
            "answers": number,
            "unfinished": sum(not one.is_finished for one in answers) / number,
            "answer_tokens": sum(one.tokens for one in answers) / number,
        }

    def samples(self, records: Sequence[Any], number: int) -> list[dict[str, Any]]:
        """Some answers, evenly spread over the set."""
        answers = [record for record in records if isinstance(record, Answered)]
        step = max(1, len(answers) // max(1, number))
        return [
            {
                "where": one.where,
                "prompt": one.prompt,
                "reference": one.reference,
                "answer": one.answer,
                **one.scores,
            }
            for one in answers[::step][:number]
        ]
