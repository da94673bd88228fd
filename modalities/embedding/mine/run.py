"""A mining run: read, embed, search, rescore, choose, write. What is finished is on disk, so a killed run goes on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
from rich.table import Table

from ....common.console import console, progress
from ....common.record import write_json
from .. import roles
from ..example import key_of
from . import pool as pools
from .choose import candidates, choose, false_negatives
from .dense import Vectors, embed, search, similarities
from .models import Encoder, Rescorer, identity
from .pool import Pool
from .ranking import fused
from .settings import Settings
from .stage import Stage


@dataclass
class Report:
    """What a run found.

    Args:
        rows: rows written, one for each positive of each row of the data.
        queries: distinct queries.
        documents: distinct documents.
        negatives: in all rows together.
        short: rows with fewer negatives than asked for.
        dropped: candidates of the queries that were passed over, by reason.
        bad: rows of the data that can't be used, by reason.
    """

    rows: int = 0
    queries: int = 0
    documents: int = 0
    negatives: int = 0
    short: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    bad: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Chosen:
    """Negatives of all queries.

    Args:
        documents: [Q, N] numbers, -1 where there is none.
        scores: [Q, N] that are written; None: none are.
        positives: [P] scores of `Pool.positives`.
    """

    documents: np.ndarray
    scores: np.ndarray | None
    positives: np.ndarray


@dataclass(frozen=True)
class Retrieved:
    """Rankings of all queries.

    Args:
        stages: where they are, one for each method.
        blocks: the queries of each file.
        found: of each block a ranking by each method.
        vectors: embeddings of queries and documents, if there are any.
    """

    stages: list[Stage]
    blocks: list[range]
    found: list[list[np.ndarray]]
    vectors: tuple[Vectors, Vectors] | None


def mine(settings: Settings) -> Report:
    """Write rows of `anchor`, `positive` and `negatives` to `settings.output`, and say what was found.

    With a cross-encoder, or where they are asked for, each row also has `scores`, of the positive and then of the
    negatives. The row's other columns are kept. Negatives that the data names itself are candidates like all other
    documents.

    Raises:
        LuthierError: the settings don't fit together, or the data or a model can't be used.
    """
    settings.check()
    settings.parts.mkdir(parents=True, exist_ok=True)
    pool = pools.read(settings)
    dropped: Counter[str] = Counter()
    chosen = _chosen(settings, pool, _retrieved(settings, pool), dropped)
    report = Report(queries=len(pool.queries), documents=len(pool.documents), dropped=dict(dropped), bad=dict(pool.bad))
    _write(settings, pool, chosen, report)
    write_json(settings.parts / "report.json", asdict(report))
    return report


def show(settings: Settings, report: Report) -> None:
    """Print a report."""
    table = Table("mined", "number")
    for name in ("rows", "queries", "documents", "negatives"):
        table.add_row(name, str(getattr(report, name)))
    table.add_row(f"rows with fewer than {settings.negatives}", str(report.short))
    for title, counts in (("passed over", report.dropped), ("left out of the data", report.bad)):
        for name, count in counts.items():
            table.add_row(f"{title}: {name}", str(count))
    console.print(table)
    console.print(f"written: {settings.output}", highlight=False)
    hint = "with it, other margins, ranks or numbers take no new embeddings; it can be deleted"
    console.print(f"kept: {settings.parts} ({hint})", highlight=False)


def _retrieved(settings: Settings, pool: Pool) -> Retrieved:
    blocks = [
        range(start, min(start + settings.piece, len(pool.queries)))
        for start in range(0, len(pool.queries), settings.piece)
    ]
    asked = {**pool.mark, "last": settings.last, "piece": settings.piece}
    found: list[list[np.ndarray]] = [[] for _ in blocks]
    stages, vectors = [], None
    if "dense" in settings.methods:
        embedded = _embedded(settings, pool)
        vectors = embedded[0][1], embedded[1][1]
        stages.append(Stage(settings.parts / "dense", asked | {name.folder.name: name.mark for name, _ in embedded}))
        _rank(settings, pool, stages[-1], blocks, found, partial(_search_vectors, vectors, settings.shard))
    if "bm25" in settings.methods:
        from .bm25 import WordIndex

        mark = {"documents": pool.documents.digest, "shard": settings.shard}
        index = WordIndex(pool.documents, Stage(settings.parts / "words", mark), settings.shard)
        stages.append(Stage(settings.parts / "bm25", asked))
        _rank(settings, pool, stages[-1], blocks, found, partial(_search_words, index, pool))
    return Retrieved(stages, blocks, found, vectors)


def _embedded(settings: Settings, pool: Pool) -> list[tuple[Stage, Vectors]]:
    """Embeddings of queries and documents, and where they are."""
    encoder = Encoder(settings)
    same = {"model": identity(str(settings.model)), "batch": settings.batch, "piece": settings.piece}
    parts = (
        ("queries", pool.queries, settings.query_prompt, encoder.queries),
        ("documents", pool.documents, settings.document_prompt, encoder.documents),
    )
    found = []
    for name, texts, prompt, encode in parts:
        stage = Stage(settings.parts / name, {**same, "prompt": prompt, "texts": texts.digest})
        found.append((stage, embed(texts, stage, settings.piece, encode)))
    return found


def _search_vectors(vectors: tuple[Vectors, Vectors], shard: int, block: range, depth: int) -> np.ndarray:
    return search(*vectors, block, depth, shard)


def _search_words(index: Any, pool: Pool, block: range, depth: int) -> np.ndarray:
    found: np.ndarray = index.search(pool.queries[block.start : block.stop], depth)
    return found


def _rank(
    settings: Settings, pool: Pool, stage: Stage, blocks: list[range], found: list[list[np.ndarray]], search: Any
) -> None:
    """Add a method's rankings to those found."""
    with progress(f"searching ({stage.folder.name})", "queries") as show:
        for at, block in enumerate(blocks):
            depth = pool.depth(block, settings.last)
            found[at].append(stage.array(f"{at:06d}", partial(search, block, depth)))
            show(block.stop, len(pool.queries))


def _chosen(settings: Settings, pool: Pool, retrieved: Retrieved, dropped: Counter[str]) -> Chosen:
    documents = np.full((len(pool.queries), settings.negatives), -1, np.int64)
    scores = np.zeros(documents.shape, np.float32) if settings.rescore or settings.scores else None
    positives = np.zeros(len(pool.positives), np.float32)
    for block, kept, own in _scored(settings, pool, retrieved, dropped):
        positives[pool.starts[block.start] : pool.starts[block.stop]] = own
        for at, query in enumerate(block):
            known = positives[pool.starts[query] : pool.starts[query + 1]]
            found = kept[at][kept["document"][at] >= 0]
            left = np.arange(len(found))
            if settings.has_similarities:
                left = left[~false_negatives(settings, found["score"], float(known.min()), dropped)]
            taken = choose(settings, pool.queries[query], found["score"] if settings.rescore else None, left)
            documents[query, : len(taken)] = found["document"][taken]
            if scores is not None:
                scores[query, : len(taken)] = found["score"][taken]
    return Chosen(documents, scores, positives)


def _scored(
    settings: Settings, pool: Pool, retrieved: Retrieved, dropped: Counter[str]
) -> Iterator[tuple[range, np.ndarray, np.ndarray]]:
    """Queries, their candidates with the scores that margins are applied to, and the scores of their positives."""
    rescorer = stage = None
    if settings.rescore is not None:
        rescorer = Rescorer(settings)
        mark = {stage.folder.name: stage.mark for stage in retrieved.stages}
        same = {"model": identity(settings.rescore), "batch": settings.batch, "piece": settings.rescored_piece}
        stage = Stage(settings.parts / "rescored", {**same, **mark, "first": settings.first, "last": settings.last})
    with progress("choosing" if rescorer is None else "rescoring", "queries") as show:
        for block, found in _small(settings, retrieved):
            ranked = found[0] if len(found) == 1 else fused(*found)
            kept = candidates(settings, pool, block, ranked, dropped)
            if stage is not None and rescorer is not None:
                raw = stage.array(f"{block.start:09d}", partial(_rescored, rescorer, pool, block, kept))
                yield block, *_apart(pool, block, kept, raw)
            else:
                yield block, *_similar(pool, block, kept, retrieved.vectors)
            show(block.stop, len(pool.queries))


def _small(settings: Settings, retrieved: Retrieved) -> Iterator[tuple[range, list[np.ndarray]]]:
    """Few queries at a time, and their rankings."""
    for block, found in zip(retrieved.blocks, retrieved.found, strict=True):
        for start in range(block.start, block.stop, settings.rescored_piece):
            part = range(start, min(start + settings.rescored_piece, block.stop))
            here = slice(part.start - block.start, part.stop - block.start)
            yield part, [np.array(ranking[here]) for ranking in found]


def _rescored(rescorer: Rescorer, pool: Pool, block: range, kept: np.ndarray) -> np.ndarray:
    """Logits of each query's positives and then of its candidates, query after query."""
    pairs = [
        (pool.queries[query], pool.documents[document])
        for at, query in enumerate(block)
        for document in [*pool.known(query).tolist(), *(n for n in kept["document"][at].tolist() if n >= 0)]
    ]
    return rescorer.scores(pairs)


def _apart(pool: Pool, block: range, kept: np.ndarray, raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Candidates with their logits, and the positives' logits, of what `_rescored` gives."""
    scored, own, at = kept.copy(), [], 0
    for row, query in enumerate(block):
        number, there = len(pool.known(query)), kept["document"][row] >= 0
        own.append(raw[at : at + number])
        scored["score"][row, there] = raw[at + number : at + number + there.sum()]
        at += number + int(there.sum())
    return scored, np.concatenate(own)


def _similar(
    pool: Pool, block: range, kept: np.ndarray, vectors: tuple[Vectors, Vectors] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Candidates with their similarities, and the positives' similarities; without vectors, the scores stay."""
    positives = pool.positives[pool.starts[block.start] : pool.starts[block.stop]]
    if vectors is None:
        return kept, np.zeros(len(positives), np.float32)
    queries, documents = vectors
    asked = queries.rows(block.start, block.stop)
    scored = kept.copy()
    scored["score"] = np.where(kept["document"] < 0, kept["score"], similarities(asked, documents, kept["document"]))
    owners = np.repeat(np.arange(len(block)), np.diff(pool.starts[block.start : block.stop + 1]))
    return scored, similarities(asked[owners], documents, positives[:, None])[:, 0]


def _write(settings: Settings, pool: Pool, chosen: Chosen, report: Report) -> None:
    """Write the output, whole or not at all."""
    temporary = settings.output.with_name(f".{settings.output.name}.new")
    with temporary.open("w", encoding="utf-8", newline="") as file, progress("writing", "rows") as show:
        for row in pools.groups(settings):
            pairs = zip(row.documents, row.labels, strict=True)
            for positive in [text for text, label in pairs if label > 0 and row.query is not None]:
                written = _row(pool, chosen, str(row.query), positive)
                file.write(json.dumps({**_kept(row.fields), **written}, ensure_ascii=False, default=str) + "\n")
                report.rows += 1
                report.negatives += len(written["negatives"])
                report.short += len(written["negatives"]) < settings.negatives
            show(report.rows, None)
    temporary.replace(settings.output)


def _row(pool: Pool, chosen: Chosen, query: str, positive: str) -> dict[str, Any]:
    number = int(pool.queries.numbers(np.array([key_of(query)]))[0])
    taken = [document for document in chosen.documents[number].tolist() if document >= 0]
    row = {"anchor": query, "positive": positive, "negatives": [pool.documents[document] for document in taken]}
    if chosen.scores is None:
        return row
    own = int(pool.documents.numbers(np.array([key_of(positive)]))[0])
    place = pool.starts[number] + np.searchsorted(pool.known(number), own)
    scores = [chosen.positives[place], *chosen.scores[number, : len(taken)]]
    return row | {"scores": [round(float(score), 6) for score in scores]}


def _kept(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Columns that stay: all but those that a reader of the output could take for parts of the pair."""
    own = roles.layout_of_roles({"anchor": "", "positive": ""})
    kept = {name: value for name, value in fields.items() if not own.knows(name) and (name, value) != ("source", "")}
    fitting = [layout.needed for layout in roles.LAYOUTS if set(layout.needed) <= {*own.needed, *kept}]
    return {name: value for name, value in kept.items() if not any(name in needed for needed in fitting)}
