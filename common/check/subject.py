"""What the questions are asked about, and what earlier ones have found for later ones."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..data.collect import Collected
from ..data.plan import Plan, Planned
from ..data.processing import Batch, PlannedData
from ..errors import LuthierError
from ..recipe import Recipe
from ..task import Task


@dataclass
class Subject:
    """A recipe under examination.

    Args:
        recipe: the resolved recipe.
        kind: its Task class.
        processing: its data path.
        reading: seconds that its training data took to be read and checked.
        sets: its data sets, by name.
        plan: its training batches on one device.
        task: its model, on the device of a run of one process.
        seconds: of a forward and backward pass of the largest batch.
        room: bytes of memory that were free before the model was loaded.
        base: bytes in use then.
        used: bytes in use since then at most, without those; None before the short training.
    """

    recipe: Recipe
    kind: type[Task]
    processing: Any = None
    reading: float = 0.0
    sets: dict[str, Collected] = field(default_factory=dict)
    plan: Plan | None = None
    task: Task | None = None
    seconds: float | None = None
    room: int = 0
    base: int = 0
    used: int | None = None

    @property
    def given(self) -> Collected:
        """The training examples."""
        return self.sets["train"]

    def batch(self, planned: Planned) -> Batch:
        """A training batch, on the device of the model, or of the data path before there is one."""
        made: Batch = PlannedData(self.processing, self.given.examples, self.recipe.train.seed)[planned]
        return made if self.task is None else made.to(self.task.device)


def largest(plan: Plan) -> Planned:
    """The batch of the first epoch with the highest cost, padding included."""
    return max((batch for batch in plan.batches() if batch.epoch == 0), key=plan.cost)


@contextmanager
def beside(recipe: Recipe) -> Iterator[Path]:
    """A temporary folder on the file system of the output.

    Raises:
        LuthierError: nothing can be written there.
    """
    place = Path(recipe.output).expanduser().absolute()
    while not place.is_dir():
        place = place.parent
    try:
        folder = tempfile.TemporaryDirectory(dir=place, prefix=".luthier-check-")
    except OSError as error:
        raise LuthierError(
            "nothing can be written where the run is to go", where="output", given=f"{place}: {error.strerror}",
            do="set output to a folder of your own",
        ) from error  # fmt: skip
    with folder as path:
        yield Path(path)
