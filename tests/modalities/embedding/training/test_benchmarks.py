"""Tasks of MTEB by name, at each evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from luthier.common.errors import LuthierError
from luthier.common.training.run import train

mteb = pytest.importorskip("mteb")


def test_a_task_is_run_at_each_evaluation(recipe_of, rows_of, pairs, tmp_path: Path, monkeypatch) -> None:
    """One of MTEB's own mock tasks, whose data lie in the package; the score is that of MTEB on the saved model."""
    from mteb.mocks.mock_tasks.reranking import MockRerankingTask
    from sentence_transformers import SentenceTransformer

    from luthier.modalities.embedding.evaluation import benchmarks

    monkeypatch.setattr(mteb, "get_tasks", lambda tasks=None: [MockRerankingTask()])
    benchmarks.load.cache_clear()
    validation = rows_of(tmp_path / "validation.jsonl", pairs(6))
    name = MockRerankingTask.metadata.name
    changes = (f"data.validation={validation}", f"evaluate.mteb=[{name}]", f"checkpoint.best=mteb/{name}")
    run = train(recipe_of(*changes)).folder
    benchmarks.load.cache_clear()
    found = json.loads((run / "metrics.json").read_text())[f"mteb/{name}"]
    model = SentenceTransformer(str(run / "checkpoints" / "best" / "model"), device="cpu")
    expected = mteb.evaluate(model, MockRerankingTask(), cache=None, show_progress_bar=False).task_results[0]
    assert found == pytest.approx(expected.get_score(), abs=1e-6)


def test_an_unknown_task_is_refused_with_the_nearest_name(recipe_of, tmp_path: Path) -> None:
    with pytest.raises(LuthierError, match="SciFact"):
        train(recipe_of("evaluate.mteb=[SciFactt]"))
    assert not (tmp_path / "run").exists()
