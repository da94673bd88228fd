"""Embedding models and rerankers for export: what texts become, and the metrics that follow from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ...common.data.processing import Batch
from ...common.errors import ExportError
from ...common.exportable import Exportable, Output
from ...common.merging import merged
from ...common.task import Predicted

TEXTS = ("input_ids", "attention_mask", "token_type_ids")


class TorchTexts:
    """A model of sentence-transformers as a runner: padded texts [B, T] in, one feature out.

    Args:
        parts: the model.
        name: of the feature.
    """

    def __init__(self, parts: Any, name: str):
        self.parts, self.name = parts.eval(), name

    @torch.no_grad()
    def __call__(self, ids: np.ndarray, mask: np.ndarray, types: np.ndarray | None = None) -> np.ndarray:
        """The feature [B, ...] of padded texts."""
        given = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
        if types is not None:
            given["token_type_ids"] = torch.from_numpy(types)
        device = next(self.parts.parameters()).device
        found: np.ndarray = self.parts({name: value.to(device) for name, value in given.items()})[self.name].float()
        return np.asarray(found.cpu() if isinstance(found, Tensor) else found)


class Trained:
    """The model that was trained as a runner, without padding as in training."""

    def __init__(self, network: Any):
        self.network = network.eval()

    @torch.no_grad()
    def __call__(self, ids: np.ndarray, mask: np.ndarray, types: np.ndarray | None = None) -> np.ndarray:
        """The feature [B, ...] of padded texts, sorted by length."""
        given = dict(zip(TEXTS, (ids, mask, types), strict=True))
        texts = {name: torch.from_numpy(value) for name, value in given.items() if value is not None}
        device = next(self.network.parameters()).device
        found: Tensor = self.network({name: value.to(device) for name, value in texts.items()})[0]
        return found.float().cpu().numpy()


class InPlace(nn.Module):
    """A runner in the place of a task's network."""

    def __init__(self, runner: Any):
        super().__init__()
        self.runner = runner

    def forward(self, texts: dict[str, Tensor], task: str | None = None) -> list[Tensor]:
        """As `Network` gives it."""
        arrays = [texts[name].cpu().numpy() if name in texts else None for name in TEXTS]
        found = torch.from_numpy(np.ascontiguousarray(self.runner(*arrays)))
        mask = texts["attention_mask"]
        if found.dim() == 3:  # features of tokens are zero where a text has ended
            found = found * mask[:, : found.shape[1], None]
        return [found, mask[:, : found.shape[1]]] if found.dim() == 3 else [found]


class TextExport(Exportable):
    """A model of sentence-transformers."""

    library: ClassVar[str] = "sentence-transformers"
    form: ClassVar[str] = "embedding"
    feature: ClassVar[str] = "sentence_embedding"
    loader: ClassVar[str] = "SentenceTransformer"

    def __init__(self, task: Any):
        super().__init__(task)
        loose = [part for part in task.parts if getattr(part, "include_prompt", True) is False]
        if loose:
            raise ExportError(
                "the pooling leaves the prompt out, which depends on the text's kind and can't be part of a graph",
                where=type(loose[0]).__name__,
                do="train with include_prompt",
            )

    def trained(self) -> Trained:
        return Trained(self.task.model)

    def save(self, directory: Path) -> None:
        first = self.task.parts[0]
        first.model = merged(first.model)
        self.task.save_pretrained(directory)

    def load(self, directory: Path) -> TorchTexts:
        import sentence_transformers

        model = getattr(sentence_transformers, self.loader)(str(directory), device="cpu")
        return TorchTexts(model, self.feature)

    def load_adapter(self, directory: Path) -> TorchTexts:
        return self.load(directory)  # it says what its base is

    def outputs(self, runner: Any, data: dict[str, Any]) -> list[Output]:
        """The feature of each text of a batch; of tokens that of its real ones."""
        given = [data[name].cpu().numpy() if data.get(name) is not None else None for name in TEXTS]
        found, lengths = runner(*given), data["attention_mask"].sum(dim=1).tolist()
        return [Output(row[:length] if row.ndim == 2 else row) for row, length in zip(found, lengths, strict=True)]

    def predict(self, runner: Any, batch: Batch) -> Predicted:
        """What the task makes of the runner's features."""
        network = self.task.model
        self.task.model = InPlace(runner)
        try:
            found = self.own_predict(batch)
        finally:
            self.task.model = network
        return found


class SparseExport(TextExport):
    """A sparse encoder."""

    form: ClassVar[str] = "sparse"
    loader: ClassVar[str] = "SparseEncoder"


class MultiVectorExport(TextExport):
    """A late-interaction model."""

    form: ClassVar[str] = "multi_vector"
    feature: ClassVar[str] = "token_embeddings"
    loader: ClassVar[str] = "MultiVectorEncoder"


class RerankerExport(TextExport):
    """A cross-encoder."""

    form: ClassVar[str] = "reranker"
    feature: ClassVar[str] = "scores"
    loader: ClassVar[str] = "CrossEncoder"
