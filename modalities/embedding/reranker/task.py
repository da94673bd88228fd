"""Trains rerankers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ....common.data.processing import Batch
from ....common.errors import DataError, ModelError, RecipeError
from ....common.task import LossSum, Predicted
from .. import sections
from ..base import EmbeddingTask
from ..evaluation import judged
from ..evaluation.names import METRICS, metrics_of
from ..model import Network, load
from ..objectives import Facts
from .config import Config
from .network import YesNoNetwork, check_logits
from .objective import objective
from .processing import PairProcessing


class Task(EmbeddingTask):
    """Trains a CrossEncoder, or an adapter of it."""

    metrics: ClassVar[dict[str, str]] = METRICS

    recipe: Config
    processing: PairProcessing

    def __init__(self, recipe: Config, weights: Path | None = None):
        super().__init__(recipe, weights)
        self.processing = self.make_processing(recipe, weights)
        model = _loaded(recipe, weights)
        model.prompts = {name: prompt for name, prompt in self.processing.prompts.items() if prompt}
        size, recompute = recipe.data.batch.chunk_tokens, recipe.train.gradient_checkpointing
        if recipe.model.template is None:
            self.model = Network(model, "scores", size, recompute)
        else:
            self.model = YesNoNetwork(model, size, recompute)
            check_logits(self.model)

    @classmethod
    def make_processing(cls, recipe: Config, weights: Path | None = None) -> PairProcessing:
        return PairProcessing(recipe, weights)

    @classmethod
    def metrics_of(cls, recipe: Any) -> dict[str, str]:
        return metrics_of(recipe.evaluate)

    def exportable(self) -> Any:
        from ..export import RerankerExport

        return RerankerExport(self)

    def logits(self, data: dict[str, Any]) -> Tensor:
        """[M, C] of a batch's documents."""
        names = ("input_ids", "attention_mask", "token_type_ids")
        found: Tensor = self.model({name: data[name] for name in names if data.get(name) is not None})[0]
        return found[data["documents"]]

    def loss(self, data: dict[str, Any]) -> LossSum:
        found = objective(self.recipe.task.loss, self.logits(data), Facts.of(data))
        return LossSum(found.total, float(found.count))

    @torch.no_grad()
    def predict(self, batch: Batch) -> Predicted:
        """What the model makes of each query's documents, with what the first stage adds, and the model's own loss.

        Raises:
            DataError: the rows don't say what the first stage made of their documents.
        """
        logits, facts = self.logits(batch.data), Facts.of(batch.data)
        found = objective(self.recipe.task.loss, logits, facts)
        scores = logits.float()
        if weight := self.recipe.evaluate.first_stage:
            if facts.teacher is None:
                raise DataError(
                    "the rows do not say what the first stage made of each document",
                    where="evaluate.first_stage",
                    given=f"{weight:g}",
                    expected="rows with `scores`",
                    do="`luthier mine --scores` writes them",
                )
            scores = scores + weight * facts.teacher[:, None]
        return Predicted(judged.judged(batch.data, scores.cpu().numpy()), LossSum(found.total, float(found.count)))

    def score(self, records: Sequence[Any]) -> dict[str, Any]:
        return self.measured(judged.families(records, self.recipe.evaluate))

    def samples(self, records: Sequence[Any], number: int) -> list[dict[str, Any]]:
        return judged.samples(self, records, number)


def _loaded(recipe: Config, weights: Path | None) -> Any:
    """The CrossEncoder of a recipe, with as many labels as its loss needs."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    section, loss = recipe.model, recipe.task.loss
    labels = loss.classes if isinstance(loss, sections.ClassLoss) else 1
    if section.template is None:  # a model without a head gets one
        build: Any = partial(CrossEncoder, num_labels=labels if labels > 1 else None)
        kind = "SEQ_CLS"
    else:

        def build(path: str, device: str, **options: Any) -> Any:
            parts = Transformer(path, transformer_task="text-generation", model_kwargs=options["model_kwargs"])
            wanted = [parts.tokenizer.convert_tokens_to_ids(t) for t in (section.true_token, section.false_token)]
            if None in wanted or parts.tokenizer.unk_token_id in wanted:
                raise ModelError(
                    "the tokenizer has no such token",
                    where="model.true_token",
                    given=f"{section.true_token}, {section.false_token}",
                )
            return CrossEncoder(modules=[parts, LogitScore(*wanted)], device=device)

        kind = None
    model = load(build, section, weights, task_type=kind)
    if section.template is None and len(list(model)) > 1:
        raise RecipeError(
            "a reranker made of a causal language model needs a template",
            where="model.template",
            do="say what it is to read, with {query} and {document}",
        )
    if section.template is None and model.num_labels != labels:
        raise ModelError(
            "the model has another number of labels than the loss needs",
            where="model.path",
            given=model.num_labels,
            expected=labels,
        )
    return model
