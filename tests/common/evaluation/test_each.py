"""What single examples add to metrics: written, read, and put beside another evaluation."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from luthier.common.evaluation import each
from luthier.common.evaluation.each import Each
from luthier.common.evaluation.run import Evaluation, beside


def test_examples_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = each.place(tmp_path, 12)
    assert each.read(file) is None
    given = [
        Each("a.jsonl:1", {"wer": (1.0, 4.0), "cer": (2.0, 20.0)}, {"speaker": "é", "age": 3}),
        Each("a.jsonl:2", {"wer": (0.0, 3.0)}, {"speaker": None}),
    ]
    each.write(file, given)
    assert [path.name for path in file.parent.iterdir()] == ["step-00000012.parquet"]
    table = each.read(file)
    assert table is not None
    assert table.where == ["a.jsonl:1", "a.jsonl:2"]
    assert [part.tolist() for part in table.parts["wer"]] == [[1.0, 0.0], [4.0, 3.0]]
    assert table.parts["cer"][1][0] == 20.0
    assert np.isnan(table.parts["cer"][0][1])
    assert table.fields == {"speaker": ["é", None], "age": ["3", None]}


def test_a_regression_set_stands_under_its_own_name() -> None:
    one, other = Each("a:1", {"loss": (1.0, 2.0)}), Each("b:1", {"loss": (3.0, 4.0)}, {"source": "b"})
    both = beside(Evaluation({}, [], [one]), "regression", Evaluation({}, [], [other]))
    assert both.each == [one, Each("b:1", {"regression/loss": (3.0, 4.0)}, {"regression/source": "b"})]
