"""Does the model load, with its tokenizer, and is there something to train?"""

from __future__ import annotations

from pathlib import Path

from .. import strategies
from ..errors import LuthierError, ModelError
from ..evaluation.saved import device
from ..quantized import BYTES
from ..recipe import Recipe
from ..seeding import seed_everything
from ..task import Task
from . import memory
from .subject import Subject

WEIGHTS = ("*.safetensors", "*.nemo", "*.bin", "*.pt", "*.pth")
"""Names of files that hold weights; where there are several kinds, they hold the same ones, and the first is read."""


def strategy(recipe: Recipe, task: Task | None = None) -> tuple[bool, str]:
    """Whether the strategy can work with this recipe, on this machine, and with its model once that is loaded."""
    strategies.refuse(recipe, task)
    return True, recipe.train.strategy


def fits(subject: Subject) -> tuple[None, str]:
    """Whether the weights alone have room in memory, asked before they are loaded: afterwards the system would answer
    by killing the process."""
    size = sum(file.stat().st_size for file in _weights(Path(subject.recipe.model.path)))
    if getattr(subject.recipe.model, "quantization", "none") != "none":
        size = int(size * BYTES / 2)  # of files in 16 bits
    subject.room = memory.free(device(subject.recipe))
    memory.restart(device(subject.recipe))
    subject.base = memory.used(device(subject.recipe))
    shown = f"{size / 1e9:.2f} GB of weights, {subject.room / 1e9:.1f} GB of memory free"
    if size > subject.room:
        raise LuthierError(
            "not enough memory for the weights",
            where="model.path",
            given=shown,
            do="use a device with more memory, a smaller model, model.quantization or a sharded strategy; "
            "`luthier estimate` says what fits",
        )
    return None, shown


def _weights(place: Path) -> list[Path]:
    """The files of a model's weights; none of a name on the hub."""
    if place.is_file():
        return [place]
    kinds = (list(place.rglob(pattern)) for pattern in WEIGHTS)
    return next((files for files in kinds if files), [])


def load(subject: Subject) -> tuple[Task, str]:
    """Load the model; something in it has to be trained."""
    recipe = subject.recipe
    seed_everything(recipe.train.seed)
    task = subject.kind(recipe).to(device(recipe))
    trained = sum(parameter.numel() for parameter in task.parameters() if parameter.requires_grad)
    whole = sum(parameter.numel() for parameter in task.parameters())
    if not trained:
        raise ModelError(
            "nothing to train: every parameter is frozen", where="model", do="unfreeze a part, or train an adapter"
        )
    subject.task = task
    return task, f"{trained / 1e6:.2f} of {whole / 1e6:.2f} million parameters are trained"
