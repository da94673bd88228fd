"""What the tests of every recogniser share: tones as recordings, manifests of them, and small recipes.

Test files can't import from each other in pytest's importlib mode, so shared functions are fixtures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile as sf

from luthier.common.data.collect import collect
from luthier.common.reading import build

RATE = 16000


def make_tone(number: int, seconds: float) -> np.ndarray:
    """A tone of its own pitch with a little noise, mono float32 at 16 kHz."""
    generator = np.random.default_rng(number)
    clock = np.arange(round(seconds * RATE)) / RATE
    wave = 0.2 * np.sin(2 * np.pi * (250 + 280 * number) * clock) + 0.003 * generator.standard_normal(len(clock))
    return wave.astype(np.float32)


def make_manifest(
    folder: Path, waves: Sequence[np.ndarray], rows: Sequence[Mapping[str, Any]], subtype: str = "FLOAT"
) -> Path:
    """`rows.jsonl` in the folder: a manifest of these recordings, which go beside it, with these other fields."""
    lines = []
    for number, (wave, row) in enumerate(zip(waves, rows, strict=True)):
        sf.write(folder / f"{number}.wav", wave, RATE, subtype=subtype)
        lines.append(json.dumps({"audio": f"{number}.wav", **row}, ensure_ascii=False) + "\n")
    file = folder / "rows.jsonl"
    file.write_text("".join(lines), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def tone() -> Callable[[int, float], np.ndarray]:
    """See `make_tone`."""
    return make_tone


@pytest.fixture(scope="session")
def write_manifest() -> Callable[..., Path]:
    """See `make_manifest`."""
    return make_manifest


@pytest.fixture(scope="session")
def recipes() -> Callable[..., Callable[..., Any]]:
    """`recipes(manifest, output, task, model)`: a function `make(path, **sections)` that gives a validated recipe, in
    which the sections are merged into small defaults."""

    def of(
        manifest: Path, output: Path, task: Mapping[str, Any], model: Mapping[str, Any] | None = None
    ) -> Callable[..., Any]:
        def make(path: str, /, **sections: Any) -> Any:
            tree: dict[str, Any] = {
                "task": dict(task),
                "model": {"path": path, **(model or {})},
                "data": {"train": str(manifest), "workers": 0},
                "train": {"steps": 1, "accelerator": "cpu", "threads": 1},
                "output": str(output),
            }
            for name, values in sections.items():
                tree[name] = tree[name] | values if name in tree and isinstance(values, dict) else values
            return build(tree, "test")

        return make

    return of


@pytest.fixture(scope="session")
def examples() -> Callable[[Any], list[Any]]:
    """`examples(processing)`: the checked training examples of its recipe."""
    return lambda processing: collect(processing.recipe.data.train, processing, processing.recipe.data).examples


@pytest.fixture(scope="session")
def collator(examples) -> Callable[..., Callable[..., Any]]:
    """`collator(usual)`: a function `make(processing, indices, generator)` that gives a batch of some of its training
    examples, the `usual` ones by default."""

    def of(usual: tuple[int, ...]) -> Callable[..., Any]:
        def make(processing: Any, indices: Sequence[int] = usual, generator: np.random.Generator | None = None) -> Any:
            found = examples(processing)
            return processing.collate([processing.encode(found[index], generator) for index in indices], generator)

        return make

    return of
