"""The example: pictures and pipeline are made on the spot, the same each time, and the adapter learns pastel."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image

from luthier.common.reading import load
from luthier.modalities.diffusion.model import latents, moments, pictured
from luthier.modalities.diffusion.shapes import drawn, judge
from luthier.modalities.diffusion.shapes.__main__ import main
from luthier.modalities.diffusion.shapes.model import make_pipeline, make_tokenizer
from luthier.modalities.diffusion.shapes.prepare import BASE_RECIPE, FOLDER

COUNTS = {"plain": 12, "pastel": 10, "held_out": 6}


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def captions(folder: Path) -> list[str]:
    lines = (folder / "metadata.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def test_every_drawing_is_named_and_is_another() -> None:
    plain, pastel = drawn.drawings(), drawn.drawings("pastel")
    assert len(plain) == len(pastel) == 4 * 7 * 6
    assert len({drawing.caption for drawing in plain}) == len(plain)
    assert plain[0].caption == "a red circle on a green background"
    assert [one.caption for one in pastel] == [one.caption for one in plain], "the adapter is the style"


def test_pastel_is_the_same_picture_nearer_to_white() -> None:
    for shape in drawn.SHAPES:
        plain, pastel = (
            np.asarray(drawn.draw(drawn.Drawing(shape, "red", "black", style), np.random.default_rng(3))).astype(float)
            for style in drawn.STYLES
        )
        assert plain.shape == (32, 32, 3)
        assert np.abs(pastel - (plain * (1 - drawn.PALE) + 255 * drawn.PALE)).max() <= 2, shape


def test_pictures_depend_on_the_seed_alone_and_held_out_combinations_are_new(tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        drawn.make_pictures(tmp_path / name, seed, **COUNTS)
    assert digests(tmp_path / "one") == digests(tmp_path / "same")
    assert digests(tmp_path / "one") != digests(tmp_path / "other")
    training, held_out = (captions(tmp_path / "one" / name) for name in ("pastel", "pastel-validation"))
    assert (len(training), len(held_out)) == (10, 6)
    assert not set(training) & set(held_out)
    assert Image.open(tmp_path / "one" / "plain" / "0000.png").size == (32, 32)


def test_the_tokenizer_reads_words_whole_and_spells_others() -> None:
    words = make_tokenizer(drawn.words())
    assert words.tokenize("a purple star in pastel") == [
        f"{word}</w>" for word in ("a", "purple", "star", "in", "pastel")
    ]
    assert "".join(words.tokenize("zebra")) == "zebra</w>"
    assert words("a").input_ids[0] == words.bos_token_id


def test_the_pipeline_loads_and_its_latents_are_scaled(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_pipeline(tmp_path / name, drawn.words(), seed=3, steps=2)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    pipe = StableDiffusionPipeline.from_pretrained(tmp_path / "one")
    pixels = torch.from_numpy(
        np.stack([np.asarray(drawn.draw(item, np.random.default_rng(0))) for item in drawn.drawings()[:64]])
    ).permute(0, 3, 1, 2)
    found = latents(dict(pipe.vae.config), moments(pipe.vae, pixels), sample=False)
    assert found.shape == (64, 8, 8, 8)
    assert float(found.std()) == pytest.approx(1.0, abs=0.35)
    assert pictured(pipe, found[:1])[0].size == (32, 32)


def test_the_judge_knows_a_drawing_when_it_is_trained() -> None:
    asked = drawn.drawings()[:40] + drawn.drawings("pastel")[:40]
    images = [drawn.draw(item, np.random.default_rng(number)) for number, item in enumerate(asked)]
    seen = judge.judged(judge.train(seed=0, steps=60), images, asked)
    assert seen["style"] > 0.7 > 0.5
    assert set(seen) == {"shape", "colour", "ground", "style", "all"}
    assert seen["all"] <= min(seen[name] for name in judge.QUESTIONS)


def test_the_recipes_name_what_is_prepared() -> None:
    for name in (BASE_RECIPE, "diffusion/shapes"):
        recipe = load(name)
        paths = [recipe.model.path, recipe.data.train[0].path, recipe.data.validation[0].path]
        assert all(f"{FOLDER}/" in path for path in paths)


@pytest.mark.slow
def test_the_adapter_learns_pastel_colours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LUTHIER_OUTPUT", raising=False)
    assert main(str(tmp_path)) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["before"]["style"] < 0.2
    assert result["after"]["style"] > 0.8
