"""A metric of a set is the sum of what its examples add, divided: the same number that `score` gives, by slice too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from luthier.common.evaluation.each import Each, Part
from luthier.modalities.asr import metrics
from luthier.modalities.diffusion.text_to_image.task import Judged as Pictured
from luthier.modalities.diffusion.text_to_image.task import Task as PictureTask
from luthier.modalities.embedding.evaluation import judged, names
from luthier.modalities.llm.causal import CausalTask, Told
from luthier.modalities.llm.prm.task import Steps
from luthier.modalities.llm.prm.task import Task as StepTask
from luthier.modalities.llm.rl import evaluation
from luthier.modalities.llm.sft.task import Answered
from luthier.modalities.llm.sft.task import Task as ChatTask


def ratio(parts: Sequence[Part]) -> float:
    return sum(part[0] for part in parts) / sum(part[1] for part in parts)


def equal(found: Sequence[Mapping[str, Part]], metrics: Mapping[str, Any]) -> set[str]:
    """Check every metric that the examples have a part in; gives their names."""
    known = {name for parts in found for name in parts}
    for name in known:
        own = [parts[name] for parts in found if name in parts]
        assert ratio(own) == pytest.approx(metrics[name], rel=1e-12), name
    return known


def test_speech() -> None:
    items = [
        metrics.Scored("Il gatto nero dorme.", "il gatto dorme", "it", "a:1", fields={"speaker": "x"}),
        metrics.Scored("la casa", "la cosa grande", "it", "a:2", fields={"speaker": "y"}),
        metrics.Scored("", "ma", "it", "a:3", fields={"speaker": "x"}),
    ]
    whole = metrics.score(items, ("speaker",))
    found = metrics.each(items, ("speaker",))
    assert equal([one.parts for one in found], whole) == {"wer", "cer", "wer_raw", "cer_raw"}
    assert [one.where for one in found] == ["a:1", "a:2", "a:3"]
    mine = [one.parts["wer"] for one in found if one.fields["speaker"] == "x"]
    assert ratio(mine) == whole["slices"]["speaker"]["x"]["wer"]


def test_language_models() -> None:
    told = [Told(3.0, 2, 4, {"topic": "a"}, "x:1"), Told(1.5, 5, 6, {}, "x:2")]
    causal: Any = SimpleNamespace(parts=lambda one: CausalTask.parts(None, one))  # type: ignore[arg-type]
    found = CausalTask.each(causal, told)
    whole = CausalTask.means(None, told)  # type: ignore[arg-type]
    assert equal([one.parts for one in found], whole) == {"loss", "accuracy"}
    assert (found[0].where, found[0].fields) == ("x:1", {"topic": "a"})


def test_answers() -> None:
    answers = [
        Answered(1.0, 1, 2, {}, "x:1", scores={"exact_match": 1.0}),
        Answered(2.0, 1, 3, {}, "x:2", scores={"exact_match": 0.0}),
        Told(2.0, 1, 3, {}, "x:3"),
    ]
    task = ChatTask.__new__(ChatTask)
    object.__setattr__(task, "__dict__", {"_scores": {"exact_match": None}})
    assert equal([task.parts(one) for one in answers], task.means(answers)) == {"loss", "accuracy", "exact_match"}


def test_rewards_of_answers() -> None:
    nan = float("nan")
    records = [
        evaluation.Judged({}, where, "p", ("x", "y", "z"), rewards, {"n": own}, (1, 1, 1), (True,) * 3)
        for where, rewards, own in (
            ("a:1", (1.0, 0.0, nan), (1.0, 0.5, nan)),
            ("a:2", (1.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
        )
    ]
    found = [evaluation.parts(one, (1, 2), 1.0) for one in records]
    assert equal(found, evaluation.means(records, (1, 2), 1.0)) == {"reward", "pass@1", "pass@2", "reward/n"}


def test_steps() -> None:
    records = [Steps(2.0, (0.9, 0.2), (True, True)), Steps(1.0, (0.4,), (False,))]
    task = StepTask.__new__(StepTask)
    assert equal([task.parts(one) for one in records], task.means(records)) == {"loss", "accuracy"}


def test_rankings() -> None:
    draw = np.random.default_rng(0)
    records = [
        judged.Judged(
            draw.normal(size=(4, 1)), (1.0, 0.0, 0.0, 1.0), "groups", 0, {"topic": str(at % 2)}, (), f"a:{at}"
        )
        for at in range(6)
    ]
    section: Any = SimpleNamespace(metrics=("reranking",), at=(1, 3), slices=("topic", "source"))
    families = judged.families(records, section)
    whole = names.by_slice(families, section.slices, ["own"])
    found: list[Each] = names.each(section.metrics, families, section.slices, ["own"])
    assert "rerank_ndcg@3" in equal([one.parts for one in found], whole)
    even = [one.parts["rerank_mrr@3"] for one in found if one.fields == {"topic": "0", "source": "own"}]
    assert ratio(even) == pytest.approx(whole["slices"]["topic"]["0"]["rerank_mrr@3"])
    assert [one.where for one in found] == [f"a:{at}" for at in range(6)]


def test_correlations_are_of_no_single_row() -> None:
    records = [judged.Judged(np.array([[at * 0.1]]), (at / 7,), "scored", 0, {}, ()) for at in range(5)]
    families = judged.families(records, SimpleNamespace(metrics=("similarity",)))
    assert names.each(("similarity",), families, (), ["own"]) == []


def test_pictures() -> None:
    found = PictureTask.each(None, [Pictured("a.png", (1.0, 3.0), {"source": "s"})])  # type: ignore[arg-type]
    assert found == [Each("a.png", {"loss": (2.0, 1.0)}, {"source": "s"})]
