"""What export has to know of a task's model: how to write it, and how to ask it and what was made of it the same.

A task gives it by `Task.exportable()`. A *runner* is a model ready to be asked: the trained one, or an artifact in the
runtime that serves it. What runners can do goes by the *form* of a model:

    causal_lm           logits(ids) -> [T, V];  generate(ids, most, ends) -> ids
    ctc                 runner(features [1, N] or [1, T, F]) -> [T, V]
    paraformer, nemo    the model in its own library
    speech_seq2seq      transcribe(features [B, F, T], prompts, most, rules) -> Spoken of each
    embedding, sparse   runner(ids [B, T], mask [B, T], types) -> [B, D]
    multi_vector        runner(ids, mask, types) -> [B, T, D]
    reranker, scorer    runner(ids, mask, types) -> [B, labels]
    text_to_image       draw(prompt, seed, width, height) -> [H, W, 3] in [0, 1]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from .errors import ExportError

if TYPE_CHECKING:
    from .data.processing import Batch
    from .task import Predicted, Task


@dataclass(frozen=True)
class Output:
    """What a model makes of one input.

    Args:
        numbers: of any shape, the same of every runner.
        text: what it writes, where it writes.
        steps: tokens that it chose one after the other, if each row of the numbers is such a step; they can be compared
            up to the first that two runners choose differently.
    """

    numbers: np.ndarray
    text: str | None = None
    steps: tuple[int, ...] | None = None


def comparable(one: Output, other: Output) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of both, up to the first step at which they choose different tokens: the later ones follow another
    text."""
    if one.steps is None or other.steps is None:
        return one.numbers, other.numbers
    same = 0
    for first, second in zip(one.steps, other.steps, strict=False):
        if first != second:
            break
        same += 1
    rows = min(same + 1, len(one.numbers), len(other.numbers))
    return one.numbers[:rows], other.numbers[:rows]


@dataclass(frozen=True)
class Spoken:
    """What a recogniser writes, token by token.

    Args:
        ids: new tokens, without the end.
        logits: [L, V] by which each was chosen, and the end if it was reached; -inf where a rule forbids a token.
    """

    ids: list[int]
    logits: np.ndarray = field(repr=False)


Rules = Callable[[Sequence[int], np.ndarray], np.ndarray]
"""(new tokens so far, logits [V]) -> logits [V] with -inf where a token is forbidden."""


def greedy(
    step: Callable[[list[int]], np.ndarray], prompt: Sequence[int], most: int, ends: Collection[int], rules: Rules
) -> Spoken:
    """The most probable tokens after a prompt, up to the first that ends them.

    Args:
        step: called with the tokens that are new to it, gives the logits [V] of the next.
        prompt: tokens to begin with.
        most: new tokens at most.
        ends: tokens that end the text.
        rules: forbid tokens.
    """
    ids: list[int] = []
    kept: list[np.ndarray] = []
    given = list(prompt)
    while len(ids) < most:
        kept.append(rules(ids, step(given)))
        token = int(kept[-1].argmax())
        if token in ends:
            break
        ids.append(token)
        given = [token]
    return Spoken(ids, np.stack(kept))


class Exportable(ABC):
    """A trained model for export. A modality subclasses it.

    Args:
        task: with the weights of a checkpoint, on the CPU, in evaluation mode.
    """

    form: ClassVar[str]
    library: ClassVar[str] = "transformers"
    """Library that loads what `save` writes, by the hub's name."""

    def __init__(self, task: Task):
        self.task: Any = task

    @property
    def adapts(self) -> bool:
        """Whether the checkpoint holds an adapter only."""
        return bool(self.task.recipe.model.lora)

    @abstractmethod
    def trained(self) -> Any:
        """The runner of the trained model itself."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write the whole model as its library loads it, an adapter merged into it, complete for inference. The task
        is of no use afterwards."""

    @abstractmethod
    def load(self, directory: Path) -> Any:
        """The runner of what `save` wrote, by its library alone."""

    def runner_of(self, model: Any) -> Any:
        """The runner of a model that some other file of this form gave, in its library."""
        raise ExportError("this model has no such format", where=type(self.task).__module__)

    def write_kohya(self, model: Path, file: Path) -> None:
        """Write the adapter of a checkpoint's `model/` in the form of kohya's scripts."""
        raise ExportError("this model has no such format", where=type(self.task).__module__)

    def load_adapter(self, directory: Path) -> Any:
        """The runner of the base model with the adapter that the checkpoint holds, by its library alone."""
        raise ExportError("this model has no adapter format", where=type(self.task).__module__)

    @abstractmethod
    def outputs(self, runner: Any, data: Any) -> list[Output]:
        """What a runner makes of the inputs of a collated batch."""

    @abstractmethod
    def predict(self, runner: Any, batch: Batch) -> Predicted:
        """What `Task.predict` gives, with a runner in the model's place."""

    def own_predict(self, batch: Batch) -> Predicted:
        """`Task.predict` as the kind defines it, whatever stands in its place for the time of an evaluation."""
        found: Predicted = type(self.task).predict(self.task, batch)
        return found


def together(outputs: Sequence[Sequence[Output]]) -> list[Output]:
    """Outputs of several batches as one list."""
    return [output for part in outputs for output in part]
