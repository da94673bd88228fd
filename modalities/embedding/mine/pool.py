"""What is mined: queries with their known positives, and the documents among which negatives are looked for."""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ....common.console import progress
from ....common.data.sources import rows
from ....common.errors import BadExample, DataError
from .. import beir, roles
from ..rows import Row
from .settings import Settings
from .texts import Texts, TextsWriter

_LOG = logging.getLogger(__name__)
_SHOWN = 3


@dataclass(frozen=True)
class Pool:
    """Distinct queries and documents; texts are on disk.

    Args:
        queries: those with a positive document.
        documents: all of the data and of the corpus.
        positives: numbers of the documents that any row names as relevant, in one array [P] for all queries.
        starts: [Q + 1] where each query's positives begin in it; they are sorted.
        bad: rows that can't be used, by reason.
    """

    queries: Texts
    documents: Texts
    positives: np.ndarray
    starts: np.ndarray
    bad: Counter[str]

    def known(self, query: int) -> np.ndarray:
        """Numbers of the documents known to be relevant to a query, sorted."""
        found: np.ndarray = self.positives[self.starts[query] : self.starts[query + 1]]
        return found

    @property
    def mark(self) -> dict[str, str]:
        """Hashes of all that is in it."""
        pairs = hashlib.sha256(self.positives.tobytes() + self.starts.tobytes()).hexdigest()
        return {"queries": self.queries.digest, "documents": self.documents.digest, "positives": pairs}

    def depth(self, block: range, last: int) -> int:
        """Documents to retrieve for each query of a block, so that `last` are left when the known ones are gone."""
        most = int(np.diff(self.starts[block.start : block.stop + 1]).max())
        return min(last + most + SLACK, len(self.documents))


SLACK = 16
"""Documents retrieved beyond those needed, so that rounding at the end of a ranking can't matter."""


def read(settings: Settings) -> Pool:
    """Read the data and the corpus once.

    Raises:
        DataError: no row has a query with a positive document, or the rows are of a shape without such.
    """
    bad: Counter[str] = Counter()
    query_keys, document_keys = array("q"), array("q")
    names = (settings.parts / "queries.txt", settings.parts / "documents.txt")
    with TextsWriter(names[0]) as queries, TextsWriter(names[1]) as documents, progress("reading", "rows") as show:
        for number, row in enumerate(groups(settings, bad), 1):
            keys = [documents.add(text) for text in row.documents]
            positives = [key for key, label in zip(keys, row.labels, strict=True) if label > 0]
            if row.query is not None and positives:
                query_keys.extend([queries.add(row.query)] * len(positives))
                document_keys.extend(positives)
            show(number, None)
        for text in _corpus(settings.corpus, bad):
            documents.add(text)
    if not query_keys:
        expected = "rows with a query and a positive document, such as anchor and positive"
        raise DataError("there is nothing to mine for", where=settings.data, given=_counted(bad), expected=expected)
    found, known = queries.finished(), documents.finished()
    pairs = np.stack([_numbers(found, query_keys), _numbers(known, document_keys)], axis=1)
    pairs = np.unique(pairs, axis=0)  # sorted by query, then by document
    starts = np.searchsorted(pairs[:, 0], np.arange(len(found) + 1))
    return Pool(found, known, np.ascontiguousarray(pairs[:, 1]), starts, bad)


def groups(settings: Settings, bad: Counter[str] | None = None) -> Iterator[Row]:
    """Rows of the data; those that can't be used are counted in `bad`, and the first of them shown.

    Raises:
        DataError: the rows are of a shape that has no positive documents.
    """
    if beir.is_beir(settings.data):
        items = beir.items(settings.data, settings.split, "", 0)
    else:
        items = roles.items(settings.data, settings.split, "", settings.roles, 0)
    for item in items:
        if isinstance(item, BadExample):
            _count(item, bad)
            continue
        if item.shape != "groups":
            expected = "queries with positive documents, such as the columns anchor and positive"
            raise DataError("rows of this shape can't be mined", where=item.where, given=item.shape, expected=expected)
        yield item


def _corpus(path: str | None, bad: Counter[str]) -> Iterator[str]:
    """Documents of a file or of a BEIR folder; a title stands before its text."""
    if path is None:
        return
    for row in rows(str(Path(path) / beir.CORPUS) if beir.is_beir(path) else path):
        if isinstance(row, BadExample):
            _count(row, bad)
            continue
        try:
            if row.fields.get("text") is None:
                given = ", ".join(map(str, row.fields))
                raise BadExample(
                    "missing_column", "the row has no text", where=row.where, given=given, expected="text, and title"
                )
            names = [name for name in ("title", "text") if row.fields.get(name) not in (None, "")]
            columns = roles.Columns({name: row.fields[name] for name in names}, row.where)
            yield " ".join(columns.text(name) for name in names)
        except BadExample as error:
            _count(error, bad)


def _count(error: BadExample, bad: Counter[str] | None) -> None:
    if bad is None:
        return
    bad[error.reason] += 1
    if bad.total() <= _SHOWN:
        _LOG.warning("left out: %s", error)


def _counted(bad: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in bad.most_common()) or "no such row"


def _numbers(texts: Texts, keys: array[int]) -> np.ndarray:
    return texts.numbers(np.array(keys, np.int64))
