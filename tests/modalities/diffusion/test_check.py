"""Mistakes that `luthier check` finds before a text-to-image model is trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

# name: (what is done to the folder, sections, what is said)
PLANTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "picture that can't be decoded": ("break", {}, "1 corrupt_image"),
    "picture cut in the middle": ("cut", {}, "1 corrupt_image"),
    "picture that is missing": ("remove", {}, "1 missing_file"),
    "captions are empty": ("empty", {}, "captions are empty"),
    "no captions": ("untell", {}, "8 no_caption"),
    "pictures too small": ("", {"image": {"resolution": 64, "step": 4, "min_side": 32}}, "8 too_small"),
    "size that is no latent": ("", {"image": {"resolution": 16, "step": 3, "min_side": 4}}, "can't be latents"),
    "adapter target": ("", {"lora": {"rank": 4, "target_modules": ["qkv_proj"]}}, "qkv_proj"),
    "metric that is not asked for": ("", {"checkpoint": {"best": "clip_score"}}, "does not give this metric"),
}


def spoilt(place: Path, how: str) -> None:
    first, table = place / "0.png", place / "metadata.jsonl"
    rows = [json.loads(line) for line in table.read_text(encoding="utf-8").splitlines()]
    if how == "break":
        first.write_bytes(b"no picture")
    if how == "cut":
        first.write_bytes(first.read_bytes()[: first.stat().st_size // 2])
    if how == "remove":
        first.unlink()
    if how == "empty":
        rows = [{**row, "text": ""} for row in rows]
    if how == "untell":
        rows = [{"file_name": row["file_name"]} for row in rows]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_found(name: str, make_recipe, folder, failures, tmp_path: Path) -> None:
    how, changes, said = PLANTED[name]
    place = tmp_path / "pictures"
    shutil.copytree(folder, place)
    spoilt(place, how)
    image = changes.get("image", {"resolution": 16, "step": 4, "min_side": 4})
    sections: dict[str, Any] = {"data": {"train": str(place), "image": image}, "output": str(tmp_path / "run")}
    if "lora" in changes:
        sections["model"] = {"lora": changes["lora"]}
    if "checkpoint" in changes:
        sections["checkpoint"] = changes["checkpoint"]
    found = failures(lambda: make_recipe("sd", **sections))
    assert any(said in one for one in found), found
    assert len(found) == 1, "one mistake is one failure"


def test_a_training_picture_among_the_validation_data_is_found(make_recipe, folder, failures, tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.mkdir()
    shutil.copy(folder / "3.png", held / "other name.png")
    (held / "other name.txt").write_text("another caption")
    sections = {"data": {"train": str(folder), "validation": str(held)}, "output": str(tmp_path / "run")}
    (found,) = failures(lambda: make_recipe("sd", **sections))
    assert "data.validation: 1 of 1 examples, such as other name.png" in found
