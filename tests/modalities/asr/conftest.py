"""What the tests of every recogniser share: tones as recordings, manifests of them, small recipes, and what is asked of
their runs.

Test files can't import from each other in pytest's importlib mode, so shared functions are fixtures.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile as sf
import torch
from safetensors.torch import load_file

from luthier.common.data.collect import collect
from luthier.common.evaluation.saved import evaluate_checkpoint
from luthier.common.reading import build
from luthier.common.training.run import train

RATE = 16000
READERS: dict[str, Callable[[Path], Any]] = {".safetensors": load_file, ".pt": partial(torch.load, weights_only=True)}


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process don't wait for the disk, leave its threads as they are, and write where the recipe says."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.delenv("LUTHIER_OUTPUT", raising=False)


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


# ---------------------------------------------------------------------------------------------- runs


def states(model: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of each file of weights in a saved model's folder."""
    return {file.name: READERS[file.suffix](file) for file in model.iterdir() if file.suffix in READERS}


@pytest.fixture(scope="session")
def stops_and_resumes(stop_before) -> Callable[[Any, int], None]:
    """`stops_and_resumes(recipe, before)`: the run is stopped before this batch of it, and goes on to its end."""

    def check(recipe: Any, before: int) -> None:
        assert train(recipe, [stop_before(before)]).stopped_by == signal.SIGTERM
        assert train(recipe).stopped_by == 0

    return check


@pytest.fixture(scope="session")
def resumes_exactly(left, stops_and_resumes) -> Callable[..., None]:
    """`resumes_exactly(recipe, steps, before)`: a run that is stopped before this batch and resumed leaves what an
    uninterrupted one does, bit for bit, and its best checkpoint alone gives the numbers of the run. `recipe(output)` is
    that of so many steps, with validation data, into a folder of this name."""

    def check(recipe: Callable[[str], Any], steps: int, before: int) -> None:
        whole, stopped = train(recipe("whole")).folder, Path(recipe("stopped").output)
        stops_and_resumes(recipe("stopped"), before)
        for curve in ("train/loss", "train/gradient_norm", "validation/loss", "validation/cer"):
            assert left.curve(stopped, curve) == left.curve(whole, curve), curve
        assert len(set(left.values(whole))) == steps
        expected, found = states(left.model(whole)), states(left.model(stopped))
        assert expected
        assert expected.keys() == found.keys()
        for name, tensors in expected.items():
            assert tensors.keys() == found[name].keys(), name
            assert all(torch.equal(value, found[name][key]) for key, value in tensors.items()), name
        best = stopped / "checkpoints" / "best"
        again, metrics = evaluate_checkpoint(best).metrics, json.loads((best / "metrics.json").read_text())
        assert (again["cer"], again["wer"]) == (metrics["cer"], metrics["wer"])
        assert again["loss"] == pytest.approx(metrics["loss"], rel=1e-5)

    return check


@pytest.fixture
def trains_as_shipped(left, stops_and_resumes, finds_nothing) -> Callable[..., None]:
    """`trains_as_shipped(recipe, utterances)`: the check has nothing against it, it trains, the loss falls, it resumes
    with the same losses, and its best checkpoint is evaluated on so many. `recipe(output)` is that of over 2 steps."""

    def check(recipe: Callable[[str], Any], utterances: int) -> None:
        assert finds_nothing(recipe("checked"))
        whole = train(recipe("whole")).folder
        stops_and_resumes(recipe("stopped"), 2)
        assert left.curve(Path(recipe("stopped").output)) == left.curve(whole)
        losses = left.values(whole)
        assert losses[-1] < losses[0]
        assert evaluate_checkpoint(whole / "checkpoints" / "best").metrics["utterances"] == utterances

    return check
