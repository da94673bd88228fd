"""Query and document read together, as a reranker does."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np

from ....common.errors import BadExample
from ..config import EmbeddingRecipe, RerankerModel
from ..example import Text, key_of
from ..processing import EmbeddingProcessing
from ..rows import Row

EMPTY = np.zeros(0, dtype=np.int32)


class PairProcessing(EmbeddingProcessing):
    """The data path of a reranker: a document's tokens are those of query and document.

    Without a template, the tokenizer joins the two, and the longer one is cut first. With a template, the end of the
    document is cut, never the query and never what the template says.

    Args:
        recipe: the resolved recipe.
        weights: directory of a saved model, whose tokenizer and settings are used.
    """

    has_corpus: ClassVar[bool] = False

    def __init__(self, recipe: EmbeddingRecipe, weights: Path | None = None):
        super().__init__(recipe, weights)
        self.template: tuple[str, str, str] | None = None
        model = recipe.model
        if isinstance(model, RerankerModel) and model.template is not None:
            begin, _, rest = model.template.replace("{instruction}", model.instruction).partition("{query}")
            between, _, end = rest.partition("{document}")
            self.template = begin, between, end

    def texts(self, row: Row) -> tuple[Text | None, tuple[Text, ...]]:
        if row.query is None or not row.documents:
            expected = "a query and documents, or two sentences"
            raise BadExample("no_documents", "the row has nothing to compare", where=row.where, expected=expected)
        source = self.sources[row.source]
        query = self.prompt_of(source, "query") + row.query
        prompt = self.prompt_of(source, "document" if row.shape == "groups" else "query")
        documents = [prompt + document for document in row.documents]
        keys = [key_of(document) for document in row.documents]
        if self.template is not None:
            read = self._templated(self.template, query, documents, keys, row.where)
            return Text(EMPTY, key_of(row.query)), tuple(read)
        pairs = self.tokenizer.pairs(query, documents, keys, self.limits["document"])
        cut = sum(query_cut for _, query_cut in pairs)
        return Text(EMPTY, key_of(row.query), cut=cut), tuple(text for text, _ in pairs)

    def _templated(
        self, template: tuple[str, str, str], query: str, documents: list[str], keys: list[int], where: str
    ) -> list[Text]:
        begin, between, end = template
        head, backend = begin + query + between, self.tokenizer.backend
        tail = backend.encode(end, add_special_tokens=False).ids
        room = self.limits["document"] - len(tail)
        found = []
        encodings = backend.encode_batch([head + document for document in documents], add_special_tokens=False)
        for key, encoding in zip(keys, encodings, strict=True):
            before = sum(stop <= len(head) for _, stop in encoding.offsets)
            if before >= room:
                raise BadExample(
                    "too_long",
                    "the query leaves no room for a document",
                    where=where,
                    given=f"{before + len(tail)} tokens without the document",
                    expected=f"fewer than {self.limits['document']}",
                    do="raise data.max_length",
                )
            ids = np.array([*encoding.ids[:room], *tail], dtype=np.int32)
            found.append(Text(ids, key, cut=max(0, len(encoding.ids) - room)))
        return found
