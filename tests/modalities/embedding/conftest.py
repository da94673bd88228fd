"""A small BERT with a vocabulary of letters and words, models made of it, and shortcuts.

Test files can't import from each other in pytest's importlib mode, so shared functions are fixtures.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from luthier.common.data.collect import Collected, collect
from luthier.modalities.embedding.config import EmbeddingRecipe, RerankerModel
from luthier.modalities.embedding.processing import EmbeddingProcessing

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SIGNS = [*string.ascii_lowercase, *string.digits]
WORDS = ["ask", "tell", "query", "passage", *(f"{letter}{at}" for letter in "qd" for at in range(8))]
VOCABULARY = [*SPECIAL, ":", "<", ">", *SIGNS, *(f"##{sign}" for sign in SIGNS), *WORDS]
"""A word that is not in it is as many tokens as it has letters."""

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def write_bert(folder: Path, kind: Any, **changes: Any) -> Path:
    tokenizer = hf.BertTokenizer(vocab={word: at for at, word in enumerate(VOCABULARY)}, model_max_length=512)
    tokenizer.save_pretrained(folder)
    config = hf.BertConfig(vocab_size=len(VOCABULARY), max_position_embeddings=64, **{**SIZES, **changes})
    torch.manual_seed(0)
    kind(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def bert_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a small BERT of transformers with 64 positions: `BertModel`, `BertForMaskedLM`, ..."""

    @cache
    def make(kind: str = "BertModel", **changes: Any) -> Path:
        return write_bert(tmp_path_factory.mktemp("bert"), getattr(hf, kind), **changes)

    return make


@pytest.fixture(scope="session")
def sentence_model_of(bert_of, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a SentenceTransformer of mean pooling: BERT with these prompts and this longest text."""

    def make(max_length: int | None = None, prompts: dict[str, str] | None = None) -> Path:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.base.modules import Normalize, Transformer
        from sentence_transformers.sentence_transformer.modules import Pooling

        options = {} if max_length is None else {"max_seq_length": max_length}
        parts = [Transformer(str(bert_of()), **options), Pooling(32), Normalize()]
        model = SentenceTransformer(modules=parts, device="cpu", prompts=prompts)
        folder = tmp_path_factory.mktemp("sentence")
        model.save_pretrained(str(folder), create_model_card=False)
        return folder

    return make


@pytest.fixture(scope="session")
def rows_of() -> Callable[[Path, Sequence[Any]], Path]:
    """A file of rows, one JSON object a line."""

    def make(file: Path, rows: Sequence[Any]) -> Path:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return file

    return make


@pytest.fixture
def data_recipe_of(bert_of, rows_of, tmp_path: Path) -> Callable[..., EmbeddingRecipe]:
    """The parts of a recipe that concern data: of rows or of what `data.train` is to be, and further keys of `data`."""

    def make(
        train: Any, model: dict[str, Any] | Path | None = None, evaluate: dict[str, Any] | None = None, **data: Any
    ) -> EmbeddingRecipe:
        if isinstance(train, list) and all("path" not in one for one in train):
            train = str(rows_of(tmp_path / "rows.jsonl", train))
        section = model if isinstance(model, dict) else {"path": str(model or bert_of())}
        kind = _WithReranker if "template" in section else EmbeddingRecipe
        return kind.model_validate(
            {
                "task": {"kind": "embedding.test"},
                "model": section,
                "data": {"train": train, "max_bad": 1.0, **data},
                "evaluate": evaluate or {},
                "output": str(tmp_path / "run"),
            }
        )

    return make


class _WithReranker(EmbeddingRecipe):
    model: RerankerModel


@pytest.fixture
def collected_of() -> Callable[..., Collected]:
    """The examples of `data.train`, read and checked for training or for evaluation."""

    def make(processing: EmbeddingProcessing, training: bool = True, name: str = "train") -> Collected:
        data = processing.recipe.data
        return collect(getattr(data, name), processing, data, f"data.{name}", training)

    return make


@pytest.fixture
def prepared(data_recipe_of, collected_of) -> Callable[..., tuple[EmbeddingProcessing, Collected]]:
    """Processing and examples of rows, as `data_recipe_of` takes them."""

    def make(train: Any, training: bool = True, **options: Any) -> tuple[EmbeddingProcessing, Collected]:
        processing = EmbeddingProcessing(data_recipe_of(train, **options))
        return processing, collected_of(processing, training)

    return make
