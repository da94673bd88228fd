"""Which column is what: told by names, or declared, and never by the columns' order."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from luthier.common.data.rows import Cursor
from luthier.common.data.rows import Row as SourceRow
from luthier.common.errors import BadExample
from luthier.modalities.embedding.example import key_of
from luthier.modalities.embedding.roles import LAYOUTS, items, layout_of_roles, row_of


def read(fields: dict[str, Any], roles: Any = None) -> Any:
    return row_of(SourceRow(fields, "rows.jsonl:7", Path(), "rows"), roles or {}, 0)


def content(row: Any) -> tuple[Any, ...]:
    return row.shape, row.query, row.documents, row.labels, row.scores


GROUP = ("groups", "q", ("p", "n"), (1.0, 0.0), ())
CASES = {
    "anchor, positive": ({"anchor": "q", "positive": "p"}, ("groups", "q", ("p",), (1.0,), ())),
    "triplet": ({"anchor": "q", "positive": "p", "negative": "n"}, GROUP),
    "query, positive": ({"query": "q", "positive": "p", "negative": "n"}, GROUP),
    "numbered": (
        {"anchor": "q", "negative_10": "n10", "positive": "p", "negative_2": "n2", "negative_1": None},
        ("groups", "q", ("p", "n2", "n10"), (1.0, 0.0, 0.0), ()),
    ),
    "lists": (
        {"query": "q", "positives": ["p", "p2"], "negatives": ["n"]},
        ("groups", "q", ("p", "p2", "n"), (1.0, 1.0, 0.0), ()),
    ),
    "a list of negatives": ({"anchor": "q", "positive": "p", "negative": ["n"]}, GROUP),
    "FlagEmbedding": (
        {"query": "q", "pos": ["p"], "neg": ["n", "m"], "pos_scores": [3], "neg_scores": [0.5, 1]},
        ("groups", "q", ("p", "n", "m"), (1.0, 0.0, 0.0), (3.0, 0.5, 1.0)),
    ),
    "no negatives": ({"query": "q", "pos": ["p"], "neg": []}, ("groups", "q", ("p",), (1.0,), ())),
    "null negatives": (
        {"query": "q", "pos": ["p"], "neg": None, "neg_scores": None},
        ("groups", "q", ("p",), (1.0,), ()),
    ),
    "scores of all": (
        {"query": "q", "positive": "p", "negative": "n", "scores": [9, 2]},
        ("groups", "q", ("p", "n"), (1.0, 0.0), (9.0, 2.0)),
    ),
    "question, answer": ({"question": "q", "answer": "p"}, ("groups", "q", ("p",), (1.0,), ())),
    "judged": ({"query": "q", "document": "p", "label": 2}, ("groups", "q", ("p",), (2.0,), ())),
    "judged, text of a table": ({"query": "q", "document": "p", "label": "0"}, ("groups", "q", ("p",), (0.0,), ())),
    "judged, bool": ({"query": "q", "document": "p", "label": True}, ("groups", "q", ("p",), (1.0,), ())),
    "listed": (
        {"query": "q", "documents": ["a", "b", "c"], "labels": [0, 1, 0]},
        ("groups", "q", ("a", "b", "c"), (0.0, 1.0, 0.0), ()),
    ),
    "listed as JSON text": (
        {"query": "q", "documents": '["a", "b"]', "labels": "[0, 1]"},
        ("groups", "q", ("a", "b"), (0.0, 1.0), ()),
    ),
    "scored": ({"sentence1": "a", "sentence2": "b", "score": -0.3}, ("scored", "a", ("b",), (-0.3,), ())),
    "NLI by name": (
        {"premise": "a", "hypothesis": "b", "label": "Neutral"},
        ("classes", "a", ("b",), (1.0,), ()),
    ),
    "NLI by number": ({"premise": "a", "hypothesis": "b", "label": 2}, ("classes", "a", ("b",), (2.0,), ())),
    "pair with a class": ({"sentence1": "a", "sentence2": "b", "label": 1}, ("classes", "a", ("b",), (1.0,), ())),
    "labelled": ({"text": "a", "label": 4}, ("labelled", "a", (), (4.0,), ())),
    "filled decides": (
        {"query": "q", "pos": ["p"], "document": None, "label": None},
        ("groups", "q", ("p",), (1.0,), ()),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_layout_is_told_by_its_names_in_any_order(name: str) -> None:
    fields, expected = CASES[name]
    assert content(read(fields)) == expected
    assert content(read(dict(reversed(fields.items())))) == expected


def test_the_cases_cover_every_layout() -> None:
    tried = [tuple(sorted(layout.needed)) for layout in LAYOUTS for fields, _ in CASES.values() if
             all(fields.get(name) is not None for name in layout.needed)]  # fmt: skip
    groups = {layout.needed for layout in LAYOUTS if layout.shape == "groups" and len(layout.needed) == 2}
    assert {"scored", "classes", "labelled", "groups"} == {layout.shape for layout in LAYOUTS}
    assert {tuple(sorted(layout.needed)) for layout in LAYOUTS if layout.needed not in groups} <= set(tried)


@pytest.mark.parametrize("query", ["anchor", "query", "question"])
@pytest.mark.parametrize("positive", ["positive", "positives", "pos", "answer"])
def test_any_name_of_a_query_goes_with_any_name_of_a_positive(query: str, positive: str) -> None:
    assert content(read({query: "q", positive: "p"})) == ("groups", "q", ("p",), (1.0,), ())


def test_a_column_that_no_layout_knows_is_a_field_and_never_a_negative() -> None:
    """Fault 10: by order, `text` would be the negative of the pair, and `hard_negative` another."""
    row = read({"anchor": "q", "positive": "p", "text": "x", "hard_negative": "y", "negative_text": "z", "id": 3})
    assert row.documents == ("p",)
    assert row.fields == {"source": "rows", "text": "x", "hard_negative": "y", "negative_text": "z", "id": 3}


def test_declared_roles() -> None:
    roles = {"anchor": "title", "positive": "body", "negatives": ("a", "b")}
    fields = {"b": ["n2", "n3"], "title": "q", "body": "p", "a": "n1", "positive": "not this one", "year": 2020}
    row = read(fields, roles)
    assert content(row) == ("groups", "q", ("p", "n1", "n2", "n3"), (1.0, 0.0, 0.0, 0.0), ())
    assert row.fields == {"source": "rows", "positive": "not this one", "year": 2020}
    assert read({**fields, "a": None}, roles).documents == ("p", "n2", "n3")
    with pytest.raises(BadExample, match=r"rows\.jsonl:7: the row has no a, declared as negatives") as caught:
        read({"title": "q", "body": "p", "b": "n"}, roles)
    assert caught.value.reason == "missing_column"
    assert "the columns title, body, b" in str(caught.value)


def test_declared_roles_make_an_ambiguous_row_clear() -> None:
    fields = {"sentence1": "a", "sentence2": "b", "score": 0.5, "label": 1}
    with pytest.raises(BadExample) as caught:
        read(fields)
    assert caught.value.reason == "ambiguous_columns"
    assert "sentence1, sentence2, score, label" in str(caught.value)
    declared = {"sentence1": "sentence1", "sentence2": "sentence2", "score": "score"}
    assert content(read(fields, declared)) == ("scored", "a", ("b",), (0.5,), ())


@pytest.mark.parametrize(
    ("roles", "problem"),
    [
        ({"anchor": "a"}, "don't belong together"),
        ({"anchor": "a", "positive": "b", "score": "c"}, "don't belong together"),
        ({"query": "a", "positive": "b", "document": "c", "label": "d"}, "don't belong together"),
    ],
)
def test_roles_that_form_nothing_are_refused(roles: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        layout_of_roles(roles)


def test_unknown_columns_are_named_with_the_layouts_there_are() -> None:
    with pytest.raises(BadExample) as caught:
        read({"title": "q", "body": "p"})
    assert caught.value.reason == "unknown_columns"
    for part in ("rows.jsonl:7", "the columns title, body", "sentence1, sentence2, score", "anchor", "roles:"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "reason", "name"),
    [
        ({"anchor": None, "positive": "p"}, "not_text", "'anchor'"),
        ({"anchor": "", "positive": "p"}, "empty_text", "'anchor'"),
        ({"anchor": "q", "positive": None}, "no_text", "'positive'"),
        ({"anchor": "q", "positive": " \n"}, "empty_text", "'positive'"),
        ({"anchor": "q", "positive": "p", "negative": ""}, "empty_text", "'negative'"),
        ({"anchor": 5, "positive": "p"}, "not_text", "'anchor'"),
        ({"anchor": "q\ud800", "positive": "p"}, "not_unicode", "'anchor'"),
        ({"query": "q", "pos": [], "neg": ["n"]}, "no_text", "'pos'"),
        ({"query": "q", "pos": ["p"], "neg": ["n", None]}, "not_text", "'neg[1]'"),
        ({"query": "q", "pos": ["p"], "neg": ["n", ""]}, "empty_text", "'neg[1]'"),
        ({"query": "q", "pos": ["p"], "neg": [], "pos_scores": [1, 2]}, "other_number", "2 for 1 texts"),
        ({"query": "q", "pos": ["p"], "neg": ["n"], "pos_scores": [1]}, "other_number", "1 for 2 documents"),
        ({"query": "q", "documents": ["a", "b"], "labels": [1]}, "other_number", "1 for 2 documents"),
        ({"query": "q", "document": "d", "label": float("nan")}, "not_a_number", "'label'"),
        ({"query": "q", "document": "d", "label": "good"}, "not_a_number", "'label'"),
        ({"sentence1": "a", "sentence2": "b", "score": None}, "not_a_number", "'score'"),
        ({"sentence1": "a", "sentence2": "b", "label": 0.5}, "not_a_class", "score"),
        ({"premise": "a", "hypothesis": "b", "label": -1}, "not_a_class", "'label'"),
        ({"premise": "a", "hypothesis": "b", "label": "maybe"}, "unknown_class", "entailment, neutral"),
    ],
)
def test_what_is_no_text_or_number_is_refused_with_its_row(fields: dict[str, Any], reason: str, name: str) -> None:
    """Fault 12: a null text gave an opaque error, an empty one was trained on."""
    with pytest.raises(BadExample) as caught:
        read(fields)
    assert caught.value.reason == reason
    assert str(caught.value).startswith("rows.jsonl:7: ")
    assert name in str(caught.value)


def test_classes_by_name_are_the_same_numbers_in_every_data_set() -> None:
    labels = [read({"text": "a", "label": name}).labels for name in ("sport", "music", "sport")]
    assert labels[0] == labels[2] != labels[1]
    assert labels[0] == (float(key_of("sport") >> 15),)
    assert int(labels[0][0]) < 2**48  # so that float holds it exactly


def test_rows_of_a_file_each_of_its_own_length(tmp_path: Path) -> None:
    """Faults 10 and 14: ragged and empty lists of negatives; counts add up."""
    rows = [
        {"query": "q0", "pos": ["p0"], "neg": ["a", "b", "c"]},
        {"query": "q1", "pos": ["p1", "p2"], "neg": []},
        {"query": "q2", "pos": ["p3"]},
        {"query": "q3", "pos": ["p4"], "neg": [""]},
        {"sentence1": "a", "sentence2": "b", "score": 1},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = list(items(str(file), None, "set", {}, 3))
    assert [len(row.documents) for row in found[:3]] == [4, 2, 1]
    assert [(row.reason, row.where) for row in found[3:]] == [
        ("empty_text", "rows.jsonl:4"),
        ("other_shape", "rows.jsonl:5"),
    ]
    assert [(row.where, row.source) for row in found[:3]] == [(f"rows.jsonl:{at}", 3) for at in (1, 2, 3)]


def test_reading_goes_on_where_a_cursor_stands(rows_of, tmp_path: Path) -> None:
    """The rows are those of a reading from the begin, also where the next row is of another shape than the first."""
    rows = [{"anchor": f"q{at}", "positive": "p"} for at in range(4)]
    rows[2] = {"text": "a", "label": 1}
    file = str(rows_of(tmp_path / "rows.jsonl", rows))
    cursor = Cursor()
    begin = list(islice(items(file, None, "set", {}, 0, cursor), 2))
    rest = list(items(file, None, "set", {}, 0, Cursor(cursor.place)))
    whole = list(items(file, None, "set", {}, 0))
    assert [one.where for one in (*begin, *rest)] == [one.where for one in whole]
    assert [getattr(one, "reason", one) for one in rest] == ["other_shape", whole[3]]


def test_lists_in_a_table_without_types(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text('query,pos,neg\nq,[1] is a note,"[""n1"", ""n2""]"\nr,p,[]\n')
    found = list(items(str(file), None, "set", {}, 0))
    assert [row.documents for row in found] == [("[1] is a note", "n1", "n2"), ("p",)]
