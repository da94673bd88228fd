"""Drawn shapes with captions: `a red circle on a blue background`; plain, or in pastel, which no caption says."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SIDE = 32
"""Pixels of a side."""
COLOURS = {
    "red": (214, 48, 49), "green": (39, 174, 96), "blue": (41, 98, 255), "yellow": (250, 211, 44),
    "purple": (142, 68, 173), "white": (245, 245, 245), "black": (20, 20, 20),
}  # fmt: skip
SHAPES = {"circle": 40, "square": 4, "triangle": 3, "star": 10}
"""Corners of each; a star's are near and far in turn."""
STYLES = ("plain", "pastel")
PALE = 0.55
"""Share of white in pastel colours."""
_FINE = 4  # drawn larger, then shrunk, for smooth edges


@dataclass(frozen=True)
class Drawing:
    """What is drawn: names of shape, colours and style."""

    shape: str
    colour: str
    ground: str
    style: str = "plain"

    @property
    def caption(self) -> str:
        return f"a {self.colour} {self.shape} on a {self.ground} background"


def drawings(style: str = "plain") -> list[Drawing]:
    """All combinations in a style; colour and background differ."""
    parts = itertools.product(SHAPES, COLOURS, COLOURS)
    return [Drawing(shape, colour, ground, style) for shape, colour, ground in parts if colour != ground]


def draw(drawing: Drawing, rng: np.random.Generator) -> Any:
    """A Pillow image of 32 x 32 pixels; size, place and turn are drawn from `rng`. Pastel is paler."""
    from PIL import Image, ImageDraw

    side = SIDE * _FINE
    radius = rng.uniform(0.36, 0.46) * side
    x, y = rng.uniform(radius, side - radius, 2)
    turn = rng.uniform(-0.15, 0.15) - math.pi / 2 + (math.pi / 4 if drawing.shape == "square" else 0.0)
    corners = SHAPES[drawing.shape]
    points = []
    for number in range(corners):
        reach = radius * (0.45 if drawing.shape == "star" and number % 2 else 1.0)
        angle = turn + 2 * math.pi * number / corners
        points.append((x + reach * math.cos(angle), y + reach * math.sin(angle)))
    image = Image.new("RGB", (side, side), COLOURS[drawing.ground])
    ImageDraw.Draw(image).polygon(points, fill=COLOURS[drawing.colour])
    if drawing.style == "pastel":
        image = Image.blend(image, Image.new("RGB", image.size, "white"), PALE)
    return image.resize((SIDE, SIDE), Image.Resampling.BOX)


def write(folder: Path, asked: Sequence[Drawing], rng: np.random.Generator) -> None:
    """Write pictures of drawings, and `metadata.jsonl`. The same arguments give the same files."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, drawing in enumerate(asked):
        name = f"{number:04d}.png"
        draw(drawing, rng).save(folder / name)
        rows.append({"file_name": name, "text": drawing.caption, "shape": drawing.shape})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_pictures(folder: Path, seed: int = 0, plain: int = 2400, pastel: int = 96, held_out: int = 48) -> None:
    """Write `plain`, `plain-validation`, `pastel` and `pastel-validation` under a folder.

    The pastel pictures of the validation show combinations that those of the training don't, so that what is measured
    is the style and not the pictures.

    Args:
        folder: where to.
        seed: fixes everything.
        plain: pictures that the small pipeline learns from.
        pastel: pictures that the adapter learns from.
        held_out: pictures of each validation set.
    """
    rng = np.random.default_rng(seed)
    everything = drawings()
    write(folder / "plain", [everything[i] for i in rng.integers(len(everything), size=plain)], rng)
    write(folder / "plain-validation", [everything[i] for i in rng.integers(len(everything), size=held_out)], rng)
    order = [drawings("pastel")[i] for i in rng.permutation(len(everything))]
    write(folder / "pastel-validation", order[:held_out], rng)
    write(folder / "pastel", list(itertools.islice(itertools.cycle(order[held_out:]), pastel)), rng)


def words() -> list[str]:
    """All captions, and the same with the style's name, for the tokenizer."""
    captions = [drawing.caption for drawing in drawings()]
    return [*captions, *(f"{caption} in pastel" for caption in captions)]
