"""The parts of mining that need no model: texts on disk, finished work, rankings, and what is chosen."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from luthier.modalities.embedding.example import key_of
from luthier.modalities.embedding.mine import pool, ranking
from luthier.modalities.embedding.mine.choose import candidates, choose, false_negatives
from luthier.modalities.embedding.mine.settings import Settings
from luthier.modalities.embedding.mine.stage import Stage
from luthier.modalities.embedding.mine.texts import Texts, TextsWriter


def written(path: Path, texts: list[str]) -> Texts:
    with TextsWriter(path) as writer:
        for text in texts:
            writer.add(text)
    return writer.finished()


# ------------------------------------------------------------------------------------------------ texts


def test_texts_are_distinct_and_keep_the_order_in_which_they_came(tmp_path: Path) -> None:
    texts = written(tmp_path / "texts", ["zürich", "b", "zürich", "", "a", "b", "漢字"])
    assert list(texts) == ["zürich", "b", "", "a", "漢字"]
    assert texts[1:4] == ["b", "", "a"]
    asked = ["漢字", "a", "zürich", "b"]
    assert texts.numbers(np.array([key_of(text) for text in asked])).tolist() == [4, 3, 0, 1]
    with pytest.raises(IndexError):
        texts[5]


def test_other_texts_have_another_digest(tmp_path: Path) -> None:
    digests = [
        written(tmp_path / str(at), texts).digest for at, texts in enumerate((["ab", "c"], ["a", "bc"], ["ab", "c"]))
    ]
    assert digests[0] == digests[2] != digests[1]


# ------------------------------------------------------------------------------------------------ stages


def test_finished_arrays_are_made_once_and_half_written_ones_again(tmp_path: Path) -> None:
    made: list[str] = []

    def make(name: str) -> np.ndarray:
        made.append(name)
        if made.count(name) == 1 and name == "broken":
            raise KeyboardInterrupt
        return np.arange(3)

    stage = Stage(tmp_path / "stage", {"seed": 1})
    stage.array("one", lambda: make("one"))
    with pytest.raises(KeyboardInterrupt):
        stage.array("broken", lambda: make("broken"))
    stage = Stage(tmp_path / "stage", {"seed": 1})
    for name in ("one", "broken"):
        found = stage.array(name, partial(make, name))
        assert isinstance(found, np.memmap)
        assert found.tolist() == [0, 1, 2]
    assert made == ["one", "broken", "broken"]


def test_other_settings_start_over_and_say_which(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("luthier").propagate = True
    caplog.set_level(logging.INFO)
    Stage(tmp_path / "stage", {"seed": 1, "model": "a", "sizes": (1, 2)}).array("one", lambda: np.zeros(1))
    Stage(tmp_path / "stage", {"seed": 1, "model": "a", "sizes": (1, 2)})
    assert not caplog.messages
    assert (tmp_path / "stage" / "one.npy").exists()
    Stage(tmp_path / "stage", {"seed": 1, "model": "b", "sizes": (1, 2)})
    assert set(caplog.messages) == {"stage starts over, as other model were used before"}
    assert [path.name for path in (tmp_path / "stage").iterdir()] == ["settings.json"]


# ------------------------------------------------------------------------------------------------ rankings


def test_equal_scores_are_ordered_by_document_and_nothing_comes_last() -> None:
    found = ranking.places(np.array([[7, -1, 3, 5, 4]]), np.array([[1.0, 9.0, 2.0, 1.0, 1.0]]))
    assert ranking.best(found, 4)["document"].tolist() == [[3, 4, 5, 7]]
    assert ranking.best(found, 5)["document"].tolist() == [[3, 4, 5, 7, -1]]
    assert ranking.merged(found[:, :3], found[:, 3:])["document"].tolist() == [[3, 4, 5]]


def test_rankings_are_fused_by_their_reciprocal_ranks() -> None:
    one = ranking.places(np.array([[5, 6, 7]]), np.array([[0.9, 0.8, 0.7]]))
    other = ranking.places(np.array([[7, 8, -1]]), np.array([[20.0, 10.0, 0.0]]))
    found = ranking.fused(one, other)[0]
    assert found["document"].tolist() == [7, 5, 6, 8, -1, -1]  # 6 and 8 are both second: the first document is first
    expected = [1 / 63 + 1 / 61, 1 / 61, 1 / 62, 1 / 62]
    np.testing.assert_allclose(found["score"][:4], expected, rtol=1e-6)


# ------------------------------------------------------------------------------------------------ candidates


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., tuple[Settings, pool.Pool]]:
    """Two queries; the first has the positives 0 and 2, the second has 1."""

    def make(**changes: Any) -> tuple[Settings, pool.Pool]:
        documents = ["Rome", "paris", "the  Forum", "ROME ", "oslo", "the forum", "Who? ", "Oslo", "bern"]
        found = pool.Pool(
            written(tmp_path / "q", ["who?", "where?"]),
            written(tmp_path / "d", documents),
            np.array([0, 2, 1]),
            np.array([0, 2, 3]),
            Counter(),
        )
        return Settings("data", tmp_path / "out", **{"model": "m", "negatives": 1, "last": 9, **changes}), found

    return make


def found_of(documents: list[int]) -> np.ndarray:
    return ranking.places(np.array([documents]), -np.arange(len(documents))[None])


def test_positives_their_doubles_and_the_query_itself_have_no_rank(small) -> None:
    settings, pool = small(last=3, negatives=1)
    dropped: Counter[str] = Counter()
    kept = candidates(settings, pool, range(0, 1), found_of([2, 1, 3, 6, 4, 0, 7, 5, 8]), dropped)
    assert kept["document"].tolist() == [[1, 4, 8]]  # paris, oslo, bern
    assert kept["score"].tolist() == [[-1, -4, -8]]
    # Rome and the forum; ROME, Who?, Oslo and the forum again
    assert dropped == {"known": 2, "duplicate": 4}


def test_the_positive_of_another_query_is_a_candidate(small) -> None:
    settings, pool = small(last=2)
    kept = candidates(settings, pool, range(1, 2), found_of([1, 0, 4]), Counter())
    assert kept["document"].tolist() == [[0, 4]]


def test_ranks_before_the_first_are_passed_over_and_those_after_the_last_not_looked_at(small) -> None:
    settings, pool = small(first=2, last=3)
    dropped: Counter[str] = Counter()
    kept = candidates(settings, pool, range(1, 2), found_of([1, 8, 4, 0, 2]), dropped)
    assert kept["document"].tolist() == [[4, 0]]
    assert dropped == {"known": 1, "window": 1}
    kept = candidates(settings, pool, range(1, 2), found_of([1, 8, 4, -1]), Counter())
    assert kept["document"].tolist() == [[4, -1]]


@pytest.mark.parametrize(
    ("changes", "positive", "expected"),
    [
        ({"relative_margin": 0.5}, 1.0, [True, True, False, False]),  # 0.5 is the border, and falls out
        ({"relative_margin": 1.0}, 0.75, [True, False, False, False]),
        ({"relative_margin": 0.5}, -0.25, [True, True, True, True]),  # the border is -0.375
        ({"relative_margin": 0.0}, 0.75, [False, False, False, False]),
        ({"margin": 0.25, "relative_margin": 0.0}, 0.5, [True, True, False, False]),  # above 0.25; 0.25 itself stays
        ({"margin": 0.0, "relative_margin": 0.0}, 0.5, [True, False, False, False]),
        ({"max_similarity": 0.25, "relative_margin": 0.0}, 0.0, [True, True, False, False]),
        ({}, 0.52, [True, True, False, False]),  # 95% of 0.52 is 0.494
        ({}, 0.53, [True, False, False, False]),  # 95% of 0.53 is 0.5035
    ],
)
def test_candidates_about_as_close_as_the_positive_are_false_negatives(
    small, changes: dict[str, Any], positive: float, expected: list[bool]
) -> None:
    settings, _ = small(**changes)
    scores = np.array([0.875, 0.5, 0.25, -0.25], np.float32)
    dropped: Counter[str] = Counter()
    assert false_negatives(settings, scores, positive, dropped).tolist() == expected
    assert dropped.total() == sum(expected)


def test_each_reason_is_counted_once(small) -> None:
    settings, _ = small(margin=0.1, max_similarity=0.3, relative_margin=0.0)
    dropped: Counter[str] = Counter()
    false_negatives(settings, np.array([0.9, 0.4, 0.2], np.float32), 0.6, dropped)
    assert dropped == {"margin": 1, "similarity": 1}


def test_the_top_is_of_the_ranks_or_of_the_cross_encoder(small) -> None:
    settings, _ = small(negatives=2)
    left = np.array([0, 2, 3])
    assert choose(settings, "who?", None, left).tolist() == [0, 2]
    assert choose(settings, "who?", np.array([1.0, 9.0, 3.0, 2.0]), left).tolist() == [2, 3]
    assert choose(settings, "who?", None, left[:1]).tolist() == [0]


def test_what_is_drawn_depends_on_the_seed_and_the_query_and_on_nothing_else(small) -> None:
    def drawn(query: str, seed: int) -> list[int]:
        settings, _ = small(negatives=5, sample="random", seed=seed)
        return choose(settings, query, None, np.arange(100)).tolist()

    assert drawn("a", 0) == drawn("a", 0)
    assert drawn("a", 0) == sorted(set(drawn("a", 0)))
    assert len({tuple(drawn(query, seed)) for query in "ab" for seed in (0, 1)}) == 4
    counts = np.bincount([one for at in range(400) for one in drawn(f"query {at}", 0)], minlength=100)
    assert counts.min() > 5  # 20 on average
    assert counts.max() < 45


# ------------------------------------------------------------------------------------------------ settings and data


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": None}, "--model"),
        ({"first": 5, "last": 4}, "--first"),
        ({"negatives": 9, "first": 2, "last": 9}, "--negatives"),
        ({"method": "bm25", "margin": 0.1}, "--margin"),
        ({"method": "bm25", "max_similarity": 0.1}, "--max-similarity"),
        ({"relative_margin": -1.0}, "--relative-margin"),
        ({"roles": {"anchor": "a", "text": "b"}}, "--role"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(small, changes: dict[str, Any], named: str) -> None:
    from luthier.common.errors import LuthierError

    with pytest.raises(LuthierError, match=f"^{named}"):
        small(**{"last": 20, **changes})[0].check()


def test_bm25_has_no_margin_unless_a_cross_encoder_scores(small) -> None:
    assert small(method="bm25")[0].least_share == 0
    assert small(method="bm25", rescore="judge")[0].least_share == 0.95
    assert small(method="both")[0].least_share == 0.95


def test_a_file_that_mining_did_not_write_is_not_overwritten(small) -> None:
    from luthier.common.errors import LuthierError

    settings, _ = small()
    settings.output.write_text("mine!")
    with pytest.raises(LuthierError, match="not overwritten"):
        settings.check()


def test_the_pool_joins_all_rows_of_a_query(tmp_path: Path, rows_of) -> None:
    rows = [
        {"query": "a", "document": "1", "label": 1},
        {"query": "b", "document": "2", "label": 0},
        {"query": "b", "document": "1", "label": 2},
        {"query": "a", "document": "3", "label": 1},
        {"query": "c", "document": "4", "label": 0},  # no positive: nothing to mine for
        {"query": "a", "document": "", "label": 1},
        {"query": "a", "document": "1", "label": 1},
    ]
    corpus = [{"text": "2"}, {"title": "T", "text": "5"}, {"title": "only"}]
    data, more = rows_of(tmp_path / "data.jsonl", rows), rows_of(tmp_path / "corpus.jsonl", corpus)
    settings = Settings(str(data), tmp_path / "out", corpus=str(more), method="bm25")
    settings.parts.mkdir()
    found = pool.read(settings)
    assert list(found.queries) == ["a", "b"]
    assert list(found.documents) == ["1", "2", "3", "4", "T 5"]
    assert [found.known(query).tolist() for query in (0, 1)] == [[0, 2], [0]]
    assert found.bad == {"empty_text": 1, "missing_column": 1}


def test_rows_without_positives_can_not_be_mined(tmp_path: Path, rows_of) -> None:
    from luthier.common.errors import DataError

    for rows in ([{"sentence1": "a", "sentence2": "b", "score": 0.5}], [{"query": "a", "document": "b", "label": 0}]):
        settings = Settings(str(rows_of(tmp_path / "data.jsonl", rows)), tmp_path / "out", method="bm25")
        settings.parts.mkdir(exist_ok=True)
        with pytest.raises(DataError, match=r"can't be mined|nothing to mine"):
            pool.read(settings)


def test_a_beir_folder_is_data_and_corpus(tmp_path: Path, rows_of) -> None:
    rows_of(tmp_path / "beir" / "queries.jsonl", [{"_id": "q", "text": "who?"}, {"_id": "r", "text": "unjudged"}])
    rows_of(tmp_path / "beir" / "corpus.jsonl", [{"_id": str(at), "title": "", "text": f"t{at}"} for at in range(3)])
    (tmp_path / "beir" / "qrels").mkdir()
    (tmp_path / "beir" / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\t1\t1\nq\t2\t0\n")
    settings = Settings(str(tmp_path / "beir"), tmp_path / "out", corpus=str(tmp_path / "beir"), method="bm25")
    settings.parts.mkdir()
    found = pool.read(settings)
    assert list(found.queries) == ["who?"]
    assert list(found.documents) == ["t1", "t2", "t0"]
    assert found.known(0).tolist() == [0]
    assert json.loads(json.dumps(found.mark)) == found.mark
