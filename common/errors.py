"""The errors that a user can meet. A message says where, what was given, what is right and what to do."""

from __future__ import annotations

from typing import Any


class LuthierError(Exception):
    """Base of all errors that the command line shows without a traceback (exit code 2).

    Args:
        problem: what is wrong, in one sentence.
        where: the place: `recipe.yaml: data.batch.seconds`, `train.jsonl:17`, a path.
        given: what was found there.
        expected: what would have been right.
        do: what the user can do about it.
    """

    def __init__(
        self, problem: str, *, where: object = None, given: object = None, expected: object = None, do: object = None
    ):
        self.problem, self.where, self.do = problem, where, None if do is None else str(do)
        parts = [f"{where}: {problem}" if where is not None else problem]
        if given is not None:
            parts.append(f"  given:    {given}")
        if expected is not None:
            parts.append(f"  expected: {expected}")
        self.told = "\n".join(parts)
        """The message without what to do."""
        if do is not None:
            parts.append(f"  do:       {do}")
        super().__init__("\n".join(parts))


class RecipeError(LuthierError):
    """The recipe, or an override on the command line, is not valid."""


class DataError(LuthierError):
    """The data can't be used as the recipe asks."""


class BadExample(DataError):
    """One example is not usable; the policy `data.on_bad` decides what follows.

    Args:
        reason: a short name under which such examples are counted, such as `corrupt_audio`.
    """

    def __init__(self, reason: str, problem: str, **details: object):
        super().__init__(problem, **details)
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return BadExample.__new__, (BadExample, *self.args), vars(self)  # so that data workers can send it


class ModelError(LuthierError):
    """The model can't be loaded, or can't do what the recipe asks of it."""


class CheckpointError(LuthierError):
    """A checkpoint is broken, incomplete or does not belong to this run."""


class ExportError(LuthierError):
    """A checkpoint can't be exported, or the artifact differs from the model."""


def missing_extra(package: str, extra: str) -> LuthierError:
    """The error for an optional library that is not installed: it names the extra that brings it."""
    return LuthierError(f"the package {package!r} is not installed", do=f"pip install 'luthier[{extra}]'")


def unreadable_model(path: str, error: Exception, family: str) -> ModelError:
    """The error for a model that its library can't load; `family` says what `path` should hold."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ModelError(
        f"the model can't be loaded: {first}",
        where="model.path",
        given=path,
        expected=f"a directory (or hub name) of {family} in transformers' format",
    )
