"""DreamBooth: a subject beside pictures of its class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from luthier.common.errors import DataError
from luthier.common.training.run import train


def dreambooth(make_recipe: Any, folder: Path, place: Path, meaning: str = "sum", **more: Any) -> Any:
    prior = {"path": str(place / "class"), "caption": "a dog", "number": 3, "steps": 2, "guidance": 2.0,
             "weight": 0.5, "meaning": meaning}  # fmt: skip
    return make_recipe(
        "sd", data={"train": str(folder), "workers": 0, "batch": {"examples": 4}, "prior": prior,
                    "image": {"resolution": 16, "step": 4, "min_side": 4}, **more},
        train={"steps": 2, "accelerator": "cpu", "log_every": 1}, output=str(place / f"run-{meaning}"),
    )  # fmt: skip


def test_missing_class_images_are_made_by_the_base_model(make_recipe, folder, tmp_path: Path, drawn_by) -> None:
    recipe = dreambooth(make_recipe, folder, tmp_path)
    train(recipe)
    files = sorted((tmp_path / "class").iterdir())
    assert [file.name for file in files] == [f"class-{number:05d}.png" for number in range(3)]
    first = np.asarray(Image.open(files[0]))
    assert np.array_equal(first, np.asarray(drawn_by(recipe.model.path, "a dog"))), "the base model's, of seed 0"
    before = {file: file.stat().st_mtime_ns for file in files}
    files[1].unlink()
    train(dreambooth(make_recipe, folder, tmp_path, "mean"))
    after = {file: file.stat().st_mtime_ns for file in sorted((tmp_path / "class").iterdir())}
    assert list(after) == files, "only what was missing is made"
    assert after[files[0]] == before[files[0]]


def denoised(task: Any, data: Any) -> torch.Tensor:
    """The error of each picture in the loss of a batch."""
    each: list[Any] = []
    plain = task.denoised
    task.denoised = lambda *a, **k: each.append(plain(*a, **k)) or each[-1]
    torch.manual_seed(0)
    with torch.no_grad():
        task.loss(data)
    squares: torch.Tensor = each[0][0]
    return squares


def test_fault_11_the_loss_with_class_images_is_as_it_says(make_recipe, folder, tmp_path: Path) -> None:
    from luthier.common.data.collect import collect
    from luthier.modalities.diffusion.text_to_image.task import Task

    found = {}
    for meaning in ("sum", "mean"):
        task = Task(dreambooth(make_recipe, folder, tmp_path, meaning))
        processing = task.processing
        examples = collect(task.recipe.data.train, processing, task.recipe.data).examples[:4]
        generator = np.random.default_rng(0)
        data = processing.collate([processing.encode(example, generator) for example in examples], generator)
        assert data["examples"] == 4
        assert data["texts"][4:] == ["a dog"] * 4
        assert [picture.source for picture in data["pictures"][4:]] == ["prior"] * 4
        torch.manual_seed(0)
        with torch.no_grad():
            loss = task.loss(data)
        found[meaning] = float(loss.sum) / loss.count
    squares = denoised(task, data)
    expected = float(squares[:4].mean() + 0.5 * squares[4:].mean())
    assert found["sum"] == pytest.approx(expected, rel=1e-6)
    assert found["mean"] == pytest.approx(expected / 2, rel=1e-6)
    evaluated = processing.collate([processing.encode(example, None) for example in examples], None)
    assert evaluated["examples"] == len(evaluated["texts"]), "an evaluation has no class images"


def test_too_few_class_images_are_told(make_recipe, folder, tmp_path: Path) -> None:
    from luthier.modalities.diffusion import class_images

    with pytest.raises(DataError, match="0 pictures"):
        class_images.files(dreambooth(make_recipe, folder, tmp_path).data.prior)
