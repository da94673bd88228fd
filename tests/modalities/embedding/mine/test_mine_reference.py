"""Mining beside sentence-transformers' own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from luthier.modalities.embedding.mine.settings import Settings

SettingsOf = Callable[..., Settings]
Mined = Callable[[Settings], list[dict[str, Any]]]


def by_reference(rows: list[dict[str, Any]], model: Path, judge: Path | None, **options: Any) -> dict[Any, Any]:
    """What sentence-transformers mines: {(anchor, positive): {negative: score}}, and the positive's score as None's."""
    from datasets import Dataset
    from sentence_transformers import CrossEncoder, SentenceTransformer
    from sentence_transformers.util import mine_hard_negatives

    data = Dataset.from_list([{"anchor": row["anchor"], "positive": row["positive"]} for row in rows])
    encoder = SentenceTransformer(str(model), device="cpu")
    rescorer = CrossEncoder(str(judge), device="cpu", activation_fn=torch.nn.Identity()) if judge else None
    found = mine_hard_negatives(
        data, encoder, cross_encoder=rescorer, batch_size=8, output_format="labeled-list", output_scores=True,
        verbose=False, **options,
    )  # fmt: skip
    return {
        (row["anchor"], row["positive"][0]): dict(zip([None, *row["positive"][1:]], row["scores"], strict=True))
        for row in found
    }


OURS: dict[str, dict[str, Any]] = {
    "top": {},
    "window": {"first": 4},
    "margin": {"margin": 0.02},
    "relative": {"relative_margin": 0.99},
    "similar": {"max_similarity": 0.9},
}
THEIRS: dict[str, dict[str, Any]] = {
    "top": {},
    "window": {"range_min": 3},
    "margin": {"absolute_margin": 0.02},
    "relative": {"relative_margin": 0.01},
    "similar": {"max_score": 0.9},
}


@pytest.mark.parametrize("case", OURS)
def test_the_negatives_are_those_that_sentence_transformers_mines(
    case: str, world, sentence_model: Path, settings_of: SettingsOf, mined: Mined
) -> None:
    number = len({row["positive"] for row in world})
    expected = by_reference(world, sentence_model, None, num_negatives=4, range_max=number, **THEIRS[case])
    found = mined(settings_of(last=number, **OURS[case]))
    assert len(found) == len(world)
    got = {(row["anchor"], row["positive"]): row["negatives"] for row in found if row["negatives"]}
    wanted = {pair: [text for text in scores if text is not None] for pair, scores in expected.items()}
    assert got == wanted
    if case != "top":
        assert got != {(row["anchor"], row["positive"]): row["negatives"] for row in mined(settings_of(last=number))}


def test_rescored_negatives_and_their_scores_are_those_of_sentence_transformers(
    world, sentence_model: Path, cross_encoder: Path, settings_of: SettingsOf, mined: Mined
) -> None:
    number = len({row["positive"] for row in world})
    options = {"num_negatives": 4, "range_max": number, "absolute_margin": 0.001}
    expected = by_reference(world, sentence_model, cross_encoder, **options)
    found = mined(settings_of(last=number, margin=0.001, rescore=str(cross_encoder)))
    got = {(row["anchor"], row["positive"]): row for row in found if row["negatives"]}
    assert got.keys() == expected.keys()
    for pair, scores in expected.items():
        row = got[pair]
        assert row["negatives"] == [text for text in scores if text is not None]
        np.testing.assert_allclose(row["scores"], list(scores.values()), atol=2e-6)
