"""BM25 over a corpus of any size: a shard of postings in memory at a time, word statistics of the whole corpus."""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from functools import cached_property, partial

import bm25s  # type: ignore[import-untyped]
import numpy as np

from ....common.console import progress
from .ranking import merged, nothing, places
from .stage import Stage
from .texts import Texts

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")
POSTING = np.dtype([("word", "<i4"), ("document", "<i4"), ("score", "<f4")])
"""A word in a document of a shard, and what it adds to the document's score."""


def words(text: str) -> list[str]:
    """Words of a text in lower case, the frequent ones too; of Chinese and Japanese, single characters."""
    return _WORD.findall(text.lower())


class Vocabulary:
    """Words of a corpus, and what BM25 has to know of all its documents.

    Args:
        texts: the corpus.
    """

    def __init__(self, texts: Texts):
        self.numbers: dict[str, int] = {}
        frequencies, total = array("q"), 0
        with progress("counting words", "texts") as show:
            for at, text in enumerate(texts, 1):
                found = words(text)
                total += len(found)
                for word in dict.fromkeys(found):  # in an order that is the same in every run
                    number = self.numbers.setdefault(word, len(frequencies))
                    if number == len(frequencies):
                        frequencies.append(0)
                    frequencies[number] += 1
                show(at, len(texts))
        self.average = total / max(len(texts), 1)
        weights = [math.log(1 + (len(texts) - count + 0.5) / (count + 0.5)) for count in frequencies]
        self.weights = np.array(weights, np.float32)
        """[V] inverse document frequencies, as Lucene has them."""

    def ids(self, text: str) -> list[int]:
        """Numbers of a text's known words."""
        return [self.numbers[word] for word in words(text) if word in self.numbers]


class WordIndex:
    """Postings of a corpus on disk, a file for each shard of documents.

    Args:
        texts: the corpus.
        stage: where they are.
        shard: documents in each.
    """

    def __init__(self, texts: Texts, stage: Stage, shard: int):
        self.texts, self.stage, self.size = texts, stage, shard

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.texts)

    def shard(self, start: int) -> bm25s.BM25:
        """The index of the documents from `start` on."""
        made = self.stage.array(f"{start // self.size:06d}", partial(self._postings, start))
        counts = np.bincount(made["word"], minlength=len(self.vocabulary.weights))
        index = bm25s.BM25(method="lucene")
        index.scores = {
            "data": np.ascontiguousarray(made["score"]),
            "indices": np.ascontiguousarray(made["document"]),
            "indptr": np.concatenate([[0], np.cumsum(counts)]),
            "num_docs": min(self.size, len(self.texts) - start),
        }
        index.nonoccurrence_array = None
        return index

    def _postings(self, start: int) -> np.ndarray:
        """Postings of a shard, sorted by word: BM25s's own index, but with the weights of the whole corpus."""
        found, documents, counts, lengths = array("i"), array("i"), array("i"), array("i")
        for document, text in enumerate(self.texts[start : start + self.size]):
            ids = self.vocabulary.ids(text)
            times = Counter(ids)
            found.extend(times.keys())
            counts.extend(times.values())
            documents.extend([document] * len(times))
            lengths.append(len(ids))
        made = np.empty(len(found), POSTING)
        made["word"], made["document"] = found, documents
        times_in, long = np.array(counts, np.float64), np.array(lengths, np.float64)[made["document"]]
        k1, b = 1.5, 0.75  # bm25s' defaults
        saturated = times_in / (k1 * ((1 - b) + b * long / max(self.vocabulary.average, 1e-9)) + times_in)
        made["score"] = self.vocabulary.weights[made["word"]] * saturated
        return made[np.argsort(made["word"], kind="stable")]

    def search(self, queries: list[str], depth: int) -> np.ndarray:
        """The documents that score highest; one that shares no word with the query is not found.

        Returns:
            [queries, depth] `ranking.FOUND`, the best first.
        """
        asked = [self.vocabulary.ids(query) for query in queries]
        found = nothing(len(queries), depth)
        for start in range(0, len(self.texts), self.size):
            index = self.shard(start)
            part = nothing(len(queries), depth)
            for at, ids in enumerate(asked):
                hits = _top(index.get_scores_from_ids(ids), depth) if ids else part[at, :0]
                part[at, : len(hits)] = hits
            part["document"] += np.where(part["document"] < 0, 0, start)
            found = merged(found, part)
        return found


def _top(scores: np.ndarray, depth: int) -> np.ndarray:
    """The best of positive scores [N], of equal ones the first, as `ranking.FOUND`."""
    hits = np.flatnonzero(scores > 0)
    if len(hits) > depth:
        least = np.partition(scores[hits], -depth)[-depth]
        hits = hits[scores[hits] >= least]
    hits = hits[np.argsort(-scores[hits], kind="stable")][:depth]
    return places(hits, scores[hits])
