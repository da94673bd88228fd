"""The models of a mining run, loaded when they are first needed."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ....common.checkpoint.directory import sha256
from ....common.errors import ModelError
from .settings import Settings

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder, SentenceTransformer


def folder_of(path: str) -> str:
    """The model's own folder, also where `path` is a checkpoint of a run."""
    inner = Path(path) / "model"
    return str(inner) if (Path(path) / "COMMIT").is_file() and inner.is_dir() else path


def identity(path: str) -> str:
    """What tells a model from another: a hash of its files, or its name on the hub."""
    folder = Path(folder_of(path))
    if not folder.is_dir():
        return path
    import hashlib

    files = sorted(file for file in folder.rglob("*") if file.is_file())
    marks = "\n".join(f"{file.relative_to(folder).as_posix()} {sha256(file)}" for file in files)
    return hashlib.sha256(marks.encode()).hexdigest()


class Encoder:
    """Embeds queries and documents, each with its prompt; vectors have length 1 if the model compares by cosine."""

    def __init__(self, settings: Settings):
        self.settings = settings

    @cached_property
    def model(self) -> SentenceTransformer:
        from sentence_transformers import SentenceTransformer

        found = _load(SentenceTransformer, str(self.settings.model), "--model", "an embedding model")
        if found.similarity_fn_name not in ("cosine", "dot"):
            given, expected = found.similarity_fn_name, "cosine or dot"
            raise ModelError("the model compares in a way that can't be searched", where="--model", given=given,
                             expected=expected)  # fmt: skip
        loaded: SentenceTransformer = found
        return loaded

    @property
    def _options(self) -> dict[str, Any]:
        normalize = self.model.similarity_fn_name == "cosine"
        return {"batch_size": self.settings.batch, "show_progress_bar": False, "normalize_embeddings": normalize}

    def queries(self, texts: list[str]) -> np.ndarray:
        """Embeddings [N, D] of queries."""
        return self._checked(self.model.encode_query(texts, prompt=self.settings.query_prompt, **self._options))

    def documents(self, texts: list[str]) -> np.ndarray:
        """Embeddings [N, D] of documents."""
        return self._checked(self.model.encode_document(texts, prompt=self.settings.document_prompt, **self._options))

    def _checked(self, found: Any) -> np.ndarray:
        vectors = np.ascontiguousarray(found, np.float32)
        if not np.isfinite(vectors).all():
            raise ModelError("an embedding is not finite", where="--model", given=self.settings.model)
        return vectors


class Rescorer:
    """Scores pairs of query and document by a cross-encoder's logit."""

    def __init__(self, settings: Settings):
        self.settings = settings

    @cached_property
    def model(self) -> CrossEncoder:
        from sentence_transformers import CrossEncoder

        found = _load(CrossEncoder, str(self.settings.rescore), "--rescore", "a cross-encoder")
        if found.num_labels != 1:
            given = f"{found.num_labels} labels"
            raise ModelError("not a model of relevance", where="--rescore", given=given, expected="one label")
        loaded: CrossEncoder = found
        return loaded

    def scores(self, pairs: list[tuple[str, str]]) -> np.ndarray:
        """Logits [N] of pairs of query and document."""
        import torch

        raw: Any = self.model.predict(
            pairs, batch_size=self.settings.batch, show_progress_bar=False, activation_fn=torch.nn.Identity()
        )
        found = np.asarray(raw, np.float32)
        if not np.isfinite(found).all():
            raise ModelError("a score is not finite", where="--rescore", given=self.settings.rescore)
        return found


def _load(build: Any, path: str, where: str, family: str) -> Any:
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    folder = folder_of(path)
    try:
        return build(folder, local_files_only=Path(folder).exists())
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        problem = f"the model can't be loaded: {first}"
        raise ModelError(problem, where=where, given=path, expected=f"the directory of {family}") from error
