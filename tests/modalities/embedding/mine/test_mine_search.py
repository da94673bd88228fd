"""Retrieval for mining: dense and BM25, in any number of shards."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import bm25s
import faiss
import numpy as np
import pytest

from luthier.modalities.embedding.mine import bm25, dense
from luthier.modalities.embedding.mine.stage import Stage
from luthier.modalities.embedding.mine.texts import Texts, TextsWriter

WORDS = [f"w{at}" for at in range(40)]
LIKELY = [1 / (at + 1) for at in range(40)]


def vectors(number: int, piece: int, seed: int) -> tuple[np.ndarray, dense.Vectors]:
    whole = np.random.default_rng(seed).standard_normal((number, 16)).astype(np.float32)
    return whole, dense.Vectors([whole[at : at + piece] for at in range(0, number, piece)], piece)


# ------------------------------------------------------------------------------------------------ dense


def test_rows_are_found_across_files() -> None:
    whole, found = vectors(23, 5, 0)
    assert len(found) == 23
    for start, stop in ((0, 23), (3, 4), (4, 6), (5, 10), (20, 23)):
        np.testing.assert_array_equal(found.rows(start, stop), whole[start:stop])
    numbers = np.array([22, 0, 7, 7, 14])
    np.testing.assert_array_equal(found.take(numbers), whole[numbers])


@pytest.mark.parametrize("shard", [1, 7, 20, 50, 1000])
def test_a_search_in_shards_finds_what_a_search_of_all_does(shard: int) -> None:
    asked, queries = vectors(70, 70, 1)
    whole, documents = vectors(50, 20, 2)
    found = dense.search(queries, documents, range(3, 70), 12, shard)
    exact = (asked[3:, None].astype(np.float64) * whole[None]).sum(-1).astype(np.float32)
    order = np.argsort(-exact, axis=1, kind="stable")[:, :12]
    np.testing.assert_array_equal(found["document"], order)
    np.testing.assert_array_equal(found["score"], np.take_along_axis(exact, order, 1))


def test_equal_documents_are_ordered_by_their_place_in_any_shards() -> None:
    _, queries = vectors(4, 4, 1)
    whole = np.repeat(vectors(1, 1, 2)[0], 30, axis=0)
    whole[11] *= 2
    documents = dense.Vectors([whole], 30)
    for shard in (4, 30):
        found = dense.search(queries, documents, range(4), 30, shard)["document"]
        rest = [at for at in range(30) if at != 11]
        assert all(row in ([11, *rest], [*rest, 11]) for row in found.tolist())


def test_no_more_than_a_shard_is_searched_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    flat = faiss.IndexFlatIP

    class Seen:
        def __init__(self, width: int):
            self.index = flat(width)

        def add(self, part: np.ndarray) -> None:
            sizes.append(len(part))
            self.index.add(part)

        def search(self, asked: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
            found: tuple[np.ndarray, np.ndarray] = self.index.search(asked, depth)
            return found

    monkeypatch.setattr(faiss, "IndexFlatIP", Seen)
    _, queries = vectors(5, 5, 1)
    _, documents = vectors(50, 20, 2)
    dense.search(queries, documents, range(5), 3, 15)
    assert sizes == [15, 15, 15, 5]


def test_only_a_piece_is_embedded_at_once_and_embeddings_stay_on_disk(tmp_path: Path) -> None:
    sizes: list[int] = []

    def encode(texts: list[str]) -> np.ndarray:
        sizes.append(len(texts))
        return np.ones((len(texts), 3), np.float32)

    texts = texts_of(tmp_path, [str(at) for at in range(10)])
    found = dense.embed(texts, Stage(tmp_path / "stage", {}), 4, encode)
    assert sizes == [4, 4, 2]
    assert all(isinstance(part, np.memmap) for part in found.parts)
    assert len(found) == 10


# ------------------------------------------------------------------------------------------------ BM25


def texts_of(folder: Path, texts: list[str]) -> Texts:
    with TextsWriter(folder / "texts") as writer:
        for text in texts:
            writer.add(text)
    return writer.finished()


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    draw = random.Random(0)
    return [" ".join([f"n{at}", *draw.choices(WORDS, LIKELY, k=draw.randint(1, 30))]) for at in range(90)]


@pytest.fixture
def index_of(tmp_path: Path, corpus: list[str]) -> Callable[[int], bm25.WordIndex]:
    def make(shard: int) -> bm25.WordIndex:
        texts = texts_of(tmp_path, corpus)
        return bm25.WordIndex(texts, Stage(tmp_path / f"words-{shard}", {}), shard)

    return make


@pytest.mark.parametrize("shard", [7, 30, 1000])
def test_scores_are_those_of_bm25s_over_the_whole_corpus(
    index_of: Callable[[int], bm25.WordIndex], corpus: list[str], shard: int
) -> None:
    reference = bm25s.BM25(method="lucene")
    reference.index([text.split() for text in corpus], show_progress=False)
    queries = ["w0 w7 w31", "w39 w38 w38", "w1 nowhere n5"]
    found = index_of(shard).search(queries, 10)
    for at, query in enumerate(queries):
        scores = reference.get_scores([word for word in query.split() if word in reference.vocab_dict])
        order = np.argsort(-scores, kind="stable")[:10]
        order = order[scores[order] > 0]
        assert found["document"][at].tolist() == [*order.tolist(), *[-1] * (10 - len(order))]
        np.testing.assert_array_equal(found["score"][at, : len(order)], scores[order])


def test_a_query_without_a_known_word_finds_nothing(index_of: Callable[[int], bm25.WordIndex]) -> None:
    assert index_of(30).search(["nowhere", "!?"], 3)["document"].tolist() == [[-1] * 3] * 2


def test_a_corpus_without_words_has_no_postings(tmp_path: Path) -> None:
    index = bm25.WordIndex(texts_of(tmp_path, ["!", "?"]), Stage(tmp_path / "words", {}), 1)
    assert index.search(["who"], 2)["document"].tolist() == [[-1, -1]]
    assert len(index.stage.array("000000", lambda: index._postings(0))) == 0


def test_words_are_lower_case_and_chinese_is_read_by_character() -> None:
    assert bm25.words("The Café's 2nd_row") == ["the", "café", "s", "2nd_row"]
    assert bm25.words("量子computing，是") == ["量", "子", "computing", "是"]


def test_postings_are_the_same_in_any_process(tmp_path: Path) -> None:
    """They are read again by a run that goes on, though sets of words have another order there."""
    script = """
import hashlib, sys
from pathlib import Path
from luthier.modalities.embedding.mine import bm25
from luthier.modalities.embedding.mine.texts import TextsWriter
with TextsWriter(Path(sys.argv[1])) as writer:
    for at in range(50):
        writer.add(" ".join(f"word{at * k % 37}" for k in range(20)))
index = bm25.WordIndex(writer.finished(), None, 50)
print(hashlib.sha256(index._postings(0).tobytes()).hexdigest())
"""
    found = {
        subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / "texts")],
            env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(found) == 1
