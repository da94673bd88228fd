"""From examples to batches, without the model: what runs in the data workers.

A modality subclasses `Processing`: it says what an example is, checks it, gives its cost, and makes model input of it.
It holds tokenizers and feature settings only, so that a worker process never carries a copy of the weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ..errors import BadExample, LuthierError
from ..recipe import Source
from .plan import Plan, Planned
from .rows import Cursor

Example = TypeVar("Example")


@dataclass(frozen=True)
class Shown:
    """One example of a batch, for reading.

    Args:
        title: which example it is.
        facts: its properties with their units.
        tokens: what the model is given or asked, piece by piece, and whether a piece carries loss.
        picture: lines of text that draw its input, if there is something to draw.
        parts: (index of a token, name) of each stretch of the tokens that comes from somewhere else than the one before
            it: documents, query and passages, answers.
    """

    title: str
    facts: dict[str, str]
    tokens: list[tuple[str, bool]]
    picture: str = ""
    parts: tuple[tuple[int, str], ...] = ()


class Processing(ABC, Generic[Example]):
    """What a modality does with its data."""

    unit: ClassVar[str] = "examples"
    """Unit of `cost`: seconds, tokens, pixels."""

    joined: bool = False
    """Whether the examples of a batch stand one after the other, without padding."""

    @abstractmethod
    def read(self, source: Source) -> Iterator[Example | BadExample]:
        """All examples of a source, unchecked; each row of the source gives at least one item."""

    def stream(self, source: Source, cursor: Cursor) -> Iterator[Example | BadExample]:
        """`read`, from the cursor on, which follows what is read; to be overridden where sources allow it. Here all is
        read from the begin, and the cursor stays there."""
        return self.read(source)

    @abstractmethod
    def examine(self, example: Example, training: bool) -> list[Example]:
        """The check: the example ready for use, or its pieces. Raises BadExample with the reason.

        What can't be trained on but can be evaluated is kept in an evaluation set (`training` false), so that the set
        does not become easier than it is.
        """

    def notes(self, example: Example) -> Mapping[str, int]:
        """What the check changed in an example, to be counted in the data report: `{"prompt tokens cut": 12}`."""
        return {}

    def contents(self, example: Example) -> Iterable[Hashable]:
        """What an example holds, whatever file or row it comes from: two examples that share any of it have it twice,
        as where test data are trained on. Nothing: not known."""
        return ()

    def units(self, example: Example) -> Sequence[Hashable]:
        """The words or tokens of an example in their order, by which examples that are nearly the same are found.
        Nothing: it has none."""
        return ()

    def doubts(self, examples: Sequence[Example]) -> Iterable[LuthierError]:
        """What is wrong with the checked training examples together, though no row alone is: told by `luthier check`,
        each with what to do."""
        return ()

    def arrange(self, examples: list[Example], training: bool) -> list[Example]:
        """The checked examples of one source, as they are planned; to be overridden where examples are cut anew."""
        return examples

    @abstractmethod
    def cost(self, example: Example) -> float:
        """Size of the example in `unit`."""

    def group(self, example: Example) -> int:
        """Examples of different groups never share a batch."""
        return 0

    def name(self, example: Example) -> str:
        """Where the example comes from, `file:row`, so that the user can look at it."""
        where = example.get("where") if isinstance(example, Mapping) else getattr(example, "where", None)
        return "unknown" if where is None else str(where)

    @abstractmethod
    def encode(self, example: Example, generator: np.random.Generator | None) -> Any:
        """Model input of one example; `generator` drives augmentation, None: no augmentation (evaluation)."""

    @abstractmethod
    def collate(self, encoded: Sequence[Any], generator: np.random.Generator | None) -> Any:
        """One batch of encoded examples, as tensors."""

    def schedule(self, plan: Plan) -> Schedule:
        """What a training makes of its plan; to be overridden where batches are made together or used several times."""
        return plan

    @abstractmethod
    def show(self, data: Any, row: int) -> Shown:
        """One example of a collated batch, as the model sees it."""

    def beside(self, data: Any, row: int) -> Mapping[str, bytes | str]:
        """What a page has room for beside that: texts by name, encoded files such as `audio.flac`, `picture.png`."""
        return {}


class Batch:
    """A batch as the task gets it. Not a dataclass, into which Lightning would look and convert what it finds.

    Args:
        number: position in the plan.
        epoch: pass over the data.
        indices: the examples in it.
        data: what `collate` made, or None if there is nothing to train on.
        real: cost of its examples, in the modality's unit.
        padded: longest cost times number of examples.
        bad: examples that could not be encoded.
        ahead: later batches that the task needs to know already.
    """

    def __init__(
        self,
        number: int,
        epoch: int,
        indices: tuple[int, ...],
        data: Any,
        real: float,
        padded: float,
        bad: tuple[BadExample, ...] = (),
        ahead: tuple[Batch, ...] = (),
    ):
        self.number, self.epoch, self.indices, self.data = number, epoch, indices, data
        self.real, self.padded, self.bad, self.ahead = real, padded, bad, ahead

    def to(self, device: torch.device) -> Batch:
        """The batch with its tensors on `device`."""
        self.data = _move(self.data, device)
        for later in self.ahead:
            later.to(device)
        return self


def _move(data: Any, device: torch.device) -> Any:
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True)
    if isinstance(data, dict):
        return {key: _move(value, device) for key, value in data.items()}
    return data


@dataclass(frozen=True, slots=True)
class Carried(Planned):
    """A batch to be made that carries its examples with it, as a data worker has not seen what was read meanwhile."""

    examples: tuple[Any, ...] = ()


class PlannedData(Dataset[Batch]):
    """Makes the batches of a plan; an item is a whole batch.

    Everything random about example `i` in epoch `e` comes from a generator seeded by (seed, e, i), and everything
    random about batch `n` from one seeded by (seed, n), so that a resumed run repeats it whatever worker makes it.
    An example that can't be encoded is left out and handed on in `Batch.bad`. Where that leaves nothing of a training
    batch, its data are those of a stand-in, while `indices` stays empty: a sharded model has to be run by all ranks.

    Args:
        processing: makes model input.
        examples: the checked examples; of batches that carry theirs, only those that may be stand-ins.
        seed: of augmentation; None: no augmentation and no stand-in (evaluation).
    """

    def __init__(self, processing: Processing[Any], examples: Sequence[Any], seed: int | None):
        self.processing, self.examples, self.seed = processing, examples, seed

    def __getitem__(self, planned: Planned) -> Batch:
        encoded, kept, costs, bad = [], [], [], []
        for index, example in zip(planned.indices, self.examples_of(planned), strict=True):
            try:
                encoded.append(self.processing.encode(example, self._generator(0, planned.epoch, index)))
            except BadExample as error:
                bad.append(error)
            else:
                kept.append(index)
                costs.append(self.processing.cost(example))
        if not encoded and self.seed is not None:
            encoded = self._stand_in()
        data = self.processing.collate(encoded, self._generator(1, planned.epoch, planned.number)) if encoded else None
        padded = sum(costs) if self.processing.joined else max(costs, default=0) * len(costs)
        ahead = tuple(self[later] for later in planned.ahead)
        return Batch(planned.number, planned.epoch, tuple(kept), data, sum(costs), padded, tuple(bad), ahead)

    def examples_of(self, planned: Planned) -> Sequence[Any]:
        """The examples of a batch."""
        if isinstance(planned, Carried):
            return planned.examples
        return [self.examples[index] for index in planned.indices]

    def names(self, planned: Planned) -> list[str]:
        """Where the examples of a batch come from, `file:row`."""
        return [self.processing.name(example) for example in self.examples_of(planned)]

    def _stand_in(self) -> list[Any]:
        """The first example that can be encoded."""
        for index, example in enumerate(self.examples):
            with suppress(BadExample):
                return [self.processing.encode(example, self._generator(0, 0, index))]
        return []

    def _generator(self, *key: int) -> np.random.Generator | None:
        return None if self.seed is None else np.random.default_rng([self.seed, *key])


class Schedule(Protocol):
    """What a training needs to know of its batches: a `Plan`, or a `StreamPlan` where they are not known ahead."""

    ranks: int
    per_step: int
    total: int

    @property
    def steps(self) -> int: ...

    def epoch_ends(self) -> list[int]: ...

    def fraction(self, number: int) -> float: ...

    def batches(self, start: int = 0, rank: int = 0) -> Iterator[Planned]: ...


class PlanSampler(Sampler[Planned]):
    """Yields one rank's batches of a plan, from where the run stands."""

    def __init__(self, plan: Schedule, rank: int = 0):
        self.plan, self.rank, self.start = plan, rank, 0

    def __iter__(self) -> Iterator[Planned]:
        return self.plan.batches(self.start, self.rank)

    def __len__(self) -> int:
        return (self.plan.total - self.start) // self.plan.ranks


def loader(data: PlannedData, sampler: Any, workers: int) -> DataLoader[Batch]:
    """A DataLoader over planned batches; pinned memory where there is a GPU."""
    return DataLoader(
        data,
        batch_size=None,
        sampler=sampler,
        num_workers=workers,
        persistent_workers=False,
        prefetch_factor=4 if workers else None,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=_one_thread if workers else None,
    )


def _one_thread(_worker: int) -> None:
    torch.set_num_threads(1)
