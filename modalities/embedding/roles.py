"""Rows of the layouts in use, told apart by the names of their columns, never by their order.

| shape | columns |
| --- | --- |
| `groups` | `anchor`, `query` or `question`; `positive`, `positives`, `pos` or `answer`; and, if there are any, |
|          | `negative`, `negative_1` ..., `negatives`, `neg`; a teacher's `pos_scores`, `neg_scores` or all `scores` |
| `groups` | `query`, `document`, `label` (1, 0 or graded); a teacher's `score` |
| `groups` | `query`, `documents`, `labels` (lists); a teacher's `scores` |
| `scored` | `sentence1`, `sentence2`, `score` (a similarity) |
| `classes` | `premise`, `hypothesis`, `label` or `sentence1`, `sentence2`, `label` (a number, or a name of NLI) |
| `labelled` | `text`, `label` (a number or a name) |

All other columns can only be slices. A row that fits none of these, or more than one, is refused unless the recipe
declares which column is what. Where a document stands there may be a list of them, each row of its own length; tables
without types have lists as JSON text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...common.data.rows import Cursor
from ...common.data.rows import Row as SourceRow
from ...common.data.sources import rows
from ...common.errors import BadExample
from .example import Shape, key_of
from .rows import Row

QUERIES = ("anchor", "query", "question")
POSITIVES = ("positive", "positives", "pos", "answer")
NEGATIVES = ("negative", "negatives", "neg")
NUMBERED = re.compile(r"negative_\d+")
NLI = {"entailment": 0, "neutral": 1, "contradiction": 2}
"""Classes by name, numbered as SNLI and MultiNLI have them."""

Roles = Mapping[str, str | tuple[str, ...]]
_Parts = tuple[str, tuple[str, ...], tuple[float, ...], tuple[float, ...]]  # query, documents, labels, scores


@dataclass(frozen=True)
class Columns:
    """A row's columns by what they are."""

    values: Mapping[str, Any]
    where: str

    def bad(self, reason: str, problem: str, given: object, expected: object, do: str = "mend the row") -> BadExample:
        shown = repr(given)
        shown = shown if len(shown) <= 120 else f"{shown[:117]}..."
        return BadExample(reason, problem, where=self.where, given=shown, expected=expected, do=do)

    def text(self, name: str) -> str:
        return self._checked(name, self.values[name])

    def texts(self, name: str) -> tuple[str, ...]:
        """One text or a list of them; none where an optional column is absent or null."""
        value = self._listed(self.values.get(name))
        if isinstance(value, list | tuple):
            return tuple(self._checked(f"{name}[{at}]", one) for at, one in enumerate(value))
        return () if value is None else (self._checked(name, value),)

    def needed_texts(self, name: str) -> tuple[str, ...]:
        """One text or more."""
        found = self.texts(name)
        if not found:
            raise self.bad("no_text", f"{name!r} holds no text", self.values[name], "a text, or a list of texts")
        return found

    def numbers(self, name: str) -> tuple[float, ...]:
        """One number or a list of them; none where the column is absent or null."""
        value = self._listed(self.values.get(name))
        if isinstance(value, list | tuple):
            return tuple(self._number(f"{name}[{at}]", one) for at, one in enumerate(value))
        return () if value is None else (self._number(name, value),)

    def number(self, name: str) -> float:
        return self._number(name, self.values[name])

    def number_of_class(self, names: Mapping[str, int] | None) -> float:
        """The class in `label`: its own number, or that of its name.

        Args:
            names: the names there are; None: any, each as a number of 48 bits that is the same in every data set.
        """
        value = self.values["label"]
        if isinstance(value, str) and not _is_number(value):
            name = self._checked("label", value)
            if names is None:
                return float(key_of(name) >> 15)
            if name.strip().lower() not in names:
                raise self.bad("unknown_class", "no such class", name, f"a number, or one of {', '.join(names)}")
            return float(names[name.strip().lower()])
        number = self._number("label", value)
        if number < 0 or number != int(number):
            raise self.bad(
                "not_a_class",
                "'label' is not the number of a class",
                value,
                "0, 1, 2, ...",
                "leave rows without a class out; a similarity belongs into `score`, or declare data's `roles`",
            )
        return number

    def _listed(self, value: Any) -> Any:
        """JSON text of a list as a list."""
        if isinstance(value, str) and value.lstrip().startswith("["):
            try:
                found = json.loads(value)
            except ValueError:
                return value
            return found if isinstance(found, list) else value
        return value

    def _checked(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise self.bad("not_text", f"{name!r} is not a text", value, "a text")
        if not value.strip():
            raise self.bad("empty_text", f"{name!r} is empty", value, "a text")
        if any("\ud800" <= sign <= "\udfff" for sign in value):
            raise self.bad("not_unicode", f"{name!r} holds half of a character", value, "text in Unicode")
        return value

    def _number(self, name: str, value: Any) -> float:
        if isinstance(value, bool | int | float) or (isinstance(value, str) and _is_number(value)):
            number = float(value)
            if math.isfinite(number):
                return number
        raise self.bad("not_a_number", f"{name!r} is not a number", value, "a finite number")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Layout:
    """Columns that belong together.

    Args:
        shape: what the labels are.
        needed: columns that a row must have.
        make: query, documents, labels and scores of the columns.
        optional: further columns that are known.
        numbered: whether `negative_1`, `negative_2`, ... are known too.
    """

    shape: Shape
    needed: tuple[str, ...]
    make: Callable[[Columns], _Parts]
    optional: tuple[str, ...] = ()
    numbered: bool = False

    def knows(self, name: str) -> bool:
        return name in self.needed or name in self.optional or (self.numbered and NUMBERED.fullmatch(name) is not None)


def _group(query: str, positive: str) -> Callable[[Columns], _Parts]:
    def make(columns: Columns) -> _Parts:
        numbered = sorted((name for name in columns.values if NUMBERED.fullmatch(name)), key=lambda name: int(name[9:]))
        positives = columns.needed_texts(positive)
        negatives = tuple(text for name in (*NEGATIVES, *numbered) for text in columns.texts(name))
        scores = columns.numbers("scores")
        if not scores:
            scores = (*_fitting(columns, "pos_scores", positives), *_fitting(columns, "neg_scores", negatives))
        labels = (1.0,) * len(positives) + (0.0,) * len(negatives)
        return columns.text(query), (*positives, *negatives), labels, scores

    return make


def _fitting(columns: Columns, name: str, texts: tuple[str, ...]) -> tuple[float, ...]:
    """Scores of texts, as many as they are, or none."""
    found = columns.numbers(name)
    if found and len(found) != len(texts):
        raise columns.bad("other_number", f"{name!r} does not fit", f"{len(found)} for {len(texts)} texts", "one each")
    return found


def _judged(columns: Columns) -> _Parts:
    return columns.text("query"), (columns.text("document"),), (columns.number("label"),), columns.numbers("score")


def _listed(columns: Columns) -> _Parts:
    documents = columns.needed_texts("documents")
    labels = columns.numbers("labels")
    if len(labels) != len(documents):
        given = f"{len(labels)} for {len(documents)} documents"
        raise columns.bad("other_number", "'labels' does not fit", given, "one each")
    return columns.text("query"), documents, labels, columns.numbers("scores")


def _pair(first: str, second: str, label: str) -> Callable[[Columns], _Parts]:
    def make(columns: Columns) -> _Parts:
        number = columns.number(label) if label == "score" else columns.number_of_class(NLI)
        return columns.text(first), (columns.text(second),), (number,), ()

    return make


def _labelled(columns: Columns) -> _Parts:
    return columns.text("text"), (), (columns.number_of_class(None),), ()


_BESIDE = (*NEGATIVES, "pos_scores", "neg_scores", "scores")
LAYOUTS = (
    *(Layout("groups", (q, p), _group(q, p), _BESIDE, True) for q in QUERIES for p in POSITIVES),
    Layout("groups", ("query", "document", "label"), _judged, ("score",)),
    Layout("groups", ("query", "documents", "labels"), _listed, ("scores",)),
    Layout("scored", ("sentence1", "sentence2", "score"), _pair("sentence1", "sentence2", "score")),
    Layout("classes", ("sentence1", "sentence2", "label"), _pair("sentence1", "sentence2", "label")),
    Layout("classes", ("premise", "hypothesis", "label"), _pair("premise", "hypothesis", "label")),
    Layout("labelled", ("text", "label"), _labelled),
)
KNOWN = (
    f"one of {', '.join(QUERIES)} with one of {', '.join(POSITIVES)} (and {', '.join(NEGATIVES)}, negative_1, ...); "
    "query, document, label; query, documents, labels; sentence1, sentence2, score; sentence1, sentence2, label; "
    "premise, hypothesis, label; text, label"
)


ROLES = frozenset(name for layout in LAYOUTS for name in (*layout.needed, *layout.optional))
"""All names, but the numbered ones, that say what a column is."""


def layout_of_roles(roles: Roles) -> Layout:
    """The layout that declared roles form. Raises ValueError if there is none, or not just one."""
    found = [layout for layout in LAYOUTS if set(layout.needed) <= roles.keys()]
    found = [layout for layout in found if all(layout.knows(name) for name in roles)]
    if len(found) != 1:
        raise ValueError(f"{', '.join(roles)} don't belong together; known are {KNOWN}")
    return found[0]


def items(
    path: str, split: str | None, label: str, roles: Roles, number: int, cursor: Cursor | None = None
) -> Iterator[Row | BadExample]:
    """Rows of a source in its own order; each row gives one, or a BadExample, so counts add up. All are of the shape of
    the first.

    Args:
        path: file, folder or data set on the hub (see `common.data.sources.rows`).
        split: split of a data set.
        label: name of the data set in reports.
        roles: which column is what; empty: told by the columns' names.
        number: of the data set.
        cursor: where to begin; it then follows the rows given.
    """
    shape: Shape | None = None
    if cursor is not None and cursor.place is not None:
        first = (row for row in items(path, split, label, roles, number) if isinstance(row, Row))
        shape = next((row.shape for row in first), None)
    for source_row in rows(path, split=split, source=label, cursor=cursor):
        if isinstance(source_row, BadExample):
            yield source_row
            continue
        try:
            found = row_of(source_row, roles, number)
        except BadExample as error:
            yield error.with_traceback(None)  # a traceback would keep the row in memory
            continue
        shape = shape or found.shape
        if found.shape != shape:
            problem = "the row is of another shape than those before it"
            yield BadExample("other_shape", problem, where=found.where, given=found.shape, expected=shape)
            continue
        yield found


def row_of(row: SourceRow, roles: Roles, number: int) -> Row:
    """One row of a data set, its columns by what they are.

    Reasons of bad examples: `unknown_columns`, `ambiguous_columns`, `missing_column`, `not_text`, `empty_text`,
    `no_text`, `not_unicode`, `not_a_number`, `other_number`, `unknown_class`, `not_a_class`.

    Raises:
        BadExample: the row can't be used, for one of these reasons.
    """
    if roles:
        layout = layout_of_roles(roles)
        values: Mapping[str, Any] = _declared(row, roles)
        used = {name for column in roles.values() for name in ((column,) if isinstance(column, str) else column)}
    else:
        layout, values = _layout(row), row.fields
        used = {name for name in values if layout.knows(name)}
    columns = Columns({name: value for name, value in values.items() if layout.knows(name)}, row.where)
    query, documents, labels, scores = layout.make(columns)
    if scores and len(scores) != len(documents):
        given = f"{len(scores)} for {len(documents)} documents"
        raise columns.bad("other_number", "a teacher's scores do not fit", given, "one for each document, or none")
    others = {name: value for name, value in row.fields.items() if name not in used}
    return Row(layout.shape, query, documents, labels, scores, row.where, number, {"source": row.source, **others})


def _declared(row: SourceRow, roles: Roles) -> dict[str, Any]:
    """Values by role; of several columns a list, without those that are null."""
    found: dict[str, Any] = {}
    for role, column in roles.items():
        names = (column,) if isinstance(column, str) else column
        missing = [name for name in names if name not in row.fields]
        if missing:
            raise BadExample(
                "missing_column",
                f"the row has no {', '.join(missing)}, declared as {role}",
                where=row.where,
                given=f"the columns {', '.join(map(str, row.fields))}",
                do="correct the row, or the roles in the recipe",
            )
        found[role] = row.fields[column] if isinstance(column, str) else _together(row, names)
    return found


def _together(row: SourceRow, names: tuple[str, ...]) -> list[Any]:
    values = [row.fields[name] for name in names if row.fields[name] is not None]
    return [one for value in values for one in (value if isinstance(value, list | tuple) else [value])]


def _layout(row: SourceRow) -> Layout:
    """The layout whose columns a row has; if several, the one whose columns are filled."""
    present = [layout for layout in LAYOUTS if all(name in row.fields for name in layout.needed)]
    given = f"the columns {', '.join(map(str, row.fields))}"
    do = "rename the columns, or declare them in the recipe, as roles: {anchor: title, positive: body}"
    if not present:
        raise BadExample(
            "unknown_columns", "which column is what is not known", where=row.where, given=given, expected=KNOWN, do=do
        )
    filled = [layout for layout in present if all(row.fields[name] is not None for name in layout.needed)] or present
    if len(filled) > 1:
        fits = "; ".join(", ".join(layout.needed) for layout in filled)
        raise BadExample(
            "ambiguous_columns",
            f"the row fits more than one layout: {fits}",
            where=row.where,
            given=given,
            expected="one",
            do=do,
        )
    return filled[0]
