"""Folders in the form of BEIR."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from luthier.common.errors import BadExample, DataError
from luthier.modalities.embedding.beir import is_beir, items
from luthier.modalities.embedding.example import key_of

CORPUS = [
    {"_id": "a", "title": "d0", "text": "tell d1"},
    {"_id": "b", "title": "", "text": "tell d2"},
    {"_id": "c", "text": "tell d3", "year": 1999},
    {"_id": "d", "title": "d4", "text": ""},
]
QUERIES = [
    {"_id": "1", "text": "ask q1", "kind": "short"},
    {"_id": 2, "text": "ask q2"},
    {"_id": "3", "text": "ask q3"},
]
TEST = [("1", "a", "2"), ("1", "b", "1"), ("2", "b", "1"), ("2", "d", "0")]


@pytest.fixture
def folder_of(rows_of, tmp_path: Path) -> Any:
    """A folder of BEIR with these judgements, by split."""

    def make(corpus: Any = CORPUS, queries: Any = QUERIES, **splits: Any) -> Path:
        folder = tmp_path / "set"
        rows_of(folder / "corpus.jsonl", corpus)
        rows_of(folder / "queries.jsonl", queries)
        (folder / "qrels").mkdir()
        for name, rows in splits.items():
            lines = ["query-id\tcorpus-id\tscore", *("\t".join(row) for row in rows)]
            (folder / "qrels" / f"{name}.tsv").write_text("\n".join(lines) + "\n")
        return folder

    return make


def test_queries_with_their_grades_then_the_rest_of_the_corpus(folder_of) -> None:
    folder = folder_of(test=TEST)
    assert is_beir(str(folder))
    assert not is_beir(str(folder / "qrels"))
    found = list(items(str(folder), None, "set", 5))
    assert [(row.query, row.documents, row.labels, row.where) for row in found] == [
        ("ask q1", ("d0 tell d1", "tell d2"), (2.0, 1.0), "queries.jsonl:1"),
        ("ask q2", ("tell d2", "d4"), (1.0, 0.0), "queries.jsonl:2"),
        (None, ("tell d3",), (0.0,), "corpus.jsonl:3"),
    ]
    assert {row.source for row in found} == {5}
    assert {row.shape for row in found} == {"groups"}
    assert found[0].fields == {"source": "set", "kind": "short"}
    assert found[2].fields == {"source": "set", "year": 1999}


def test_judgements_of_what_is_not_there_are_named_and_counted(folder_of) -> None:
    corpus = [*CORPUS, {"_id": "a", "text": "again"}, {"_id": "e", "title": None, "text": " "}, {"text": "no id"}]
    rows = [*TEST, ("9", "a", "1"), ("1", "zzz", "1"), ("1", "c", "good"), ("1", "e", "1")]
    found = list(items(str(folder_of(corpus=corpus, test=rows)), "test", "set", 0))
    bad = [(row.reason, row.where) for row in found if isinstance(row, BadExample)]
    assert bad == [
        ("duplicate_id", "corpus.jsonl:5"),
        ("empty_text", "corpus.jsonl:6"),
        ("missing_column", "corpus.jsonl:7"),
        ("missing_id", "test.tsv:6"),
        ("missing_id", "test.tsv:7"),
        ("not_a_number", "test.tsv:8"),
        ("missing_id", "test.tsv:9"),
    ]
    named = [str(row) for row in found if isinstance(row, BadExample) and row.reason == "missing_id"]
    assert "'9'" in named[0]
    assert "'zzz'" in named[1]
    assert [row.query for row in found if not isinstance(row, BadExample)] == ["ask q1", "ask q2", None]


def test_the_split_is_chosen_or_asked_for(folder_of) -> None:
    folder = folder_of(train=[("3", "c", "1")], test=TEST)
    assert [row.query for row in items(str(folder), "train", "set", 0)] == ["ask q3", None, None, None]
    with pytest.raises(DataError, match="several splits") as caught:
        list(items(str(folder), None, "set", 0))
    assert "test, train" in str(caught.value)
    with pytest.raises(DataError, match="no such split"):
        list(items(str(folder), "dev", "set", 0))


def test_training_is_on_pairs_and_evaluation_on_the_whole_corpus(folder_of, prepared, collected_of) -> None:
    folder = folder_of(train=TEST)
    processing, train = prepared(str(folder))
    assert [one.where for one in train.examples] == ["queries.jsonl:1", "queries.jsonl:2"]
    assert train.report.dropped == {}
    assert (train.report.rows, train.report.kept_rows, train.report.examples) == (3, 3, 2)
    whole = collected_of(processing, training=False)
    assert [one.query is None for one in whole.examples] == [False, False, True]
    assert whole.examples[2].documents[0].key == key_of("tell d3")
    assert whole.examples[0].known == tuple(sorted((key_of("d0 tell d1"), key_of("tell d2"))))
    assert whole.examples[1].known == (key_of("tell d2"),)  # the judged document of grade 0 is not relevant
