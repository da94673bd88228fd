"""Lists of what an embedding model finds, for a reranker to order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..metrics.retrieval import nearest


def make_lists(model: Path, pairs: Path, to: Path, length: int = 10) -> int:
    """Write for each pair's anchor the documents that a model finds first among those of all pairs: rows of `query`,
    `documents`, `labels` and `scores`. A query whose own document is not among them is left out.

    Args:
        model: directory of a SentenceTransformer.
        pairs: rows of `anchor` and `positive`.
        to: file of the lists.
        length: documents in each.

    Returns:
        The number of lists.
    """
    from sentence_transformers import SentenceTransformer

    rows = [json.loads(line) for line in pairs.read_text(encoding="utf-8").splitlines()]
    encoder: Any = SentenceTransformer(str(model), device="cpu")
    queries = encoder.encode_query([row["anchor"] for row in rows], convert_to_tensor=True)
    documents = encoder.encode_document([row["positive"] for row in rows], convert_to_tensor=True)
    values, places = nearest(queries, documents, length)
    lists = []
    for at, (found, near) in enumerate(zip(places.tolist(), values.tolist(), strict=True)):
        if at in found:
            texts = [rows[place]["positive"] for place in found]
            labels, scores = [float(place == at) for place in found], [round(value, 6) for value in near]
            lists.append({"query": rows[at]["anchor"], "documents": texts, "labels": labels, "scores": scores})
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in lists), encoding="utf-8")
    return len(lists)
