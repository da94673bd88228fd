"""The rewards of a recipe: `rewards: [{kind: exact, weight: 1.0}, {kind: overlong, ...}]`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from .....common.recipe import LocalOrHub, Section, absolute_if_local


def function_name(value: str) -> str:
    """`module:function`; a file becomes absolute, so that the saved recipe works from any folder."""
    place, sign, name = value.rpartition(":")
    if not sign or not place or not name.isidentifier():
        raise ValueError("not module:function or file.py:function")
    return f"{absolute_if_local(place)}:{name}"


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return value


_KIND = "What is looked at."

Tag = Annotated[str, Field(pattern=r"^\w[\w-]*$")]
"""Name of a tag, without its brackets."""


class RewardSection(Section):
    """What every reward has."""

    kind: str
    """What is looked at."""
    weight: float = 1.0
    """Factor in the sum of rewards; 0: the score is only watched."""
    name: str | None = None
    """Name in logs and tables; default: the kind, or the function's name."""

    @property
    def label(self) -> str:
        return self.name or self.kind


class ReferenceSection(RewardSection):
    """A reward that compares the answer with a field of the row. What stands before the last `</think>` is no part of
    the answer."""

    reference: str = "answer"
    """Field of the row that holds the reference."""
    tag: Tag | None = None
    """Compare what stands in this tag of the answer, such as `answer`; an answer without it is wrong. Default: all."""


class Function(RewardSection):
    """Your own function, `score(answers, **parameters)`, that is called with a batch of `rewards.answer.Answer` and
    returns as many numbers; None is no score. It may be async. If it raises for a batch, it is called with each answer
    alone, so that the error stays with the answer that caused it."""

    kind: Literal["function"] = Field("function", description=_KIND)
    function: Annotated[str, AfterValidator(function_name)]
    """`module:function` or `file.py:function`."""
    parameters: Mapping[str, Any] = Field(default_factory=dict)
    """Further arguments of the function."""
    timeout: float | None = Field(None, gt=0)
    """Seconds for a call. One that takes longer gives no scores, and is left running in its thread, since a thread
    can't be ended. Default: no bound."""

    @property
    def label(self) -> str:
        return self.name or self.function.rpartition(":")[2]


class Exact(ReferenceSection):
    """1 if the answer is the reference, but for white space; else 0."""

    kind: Literal["exact"] = Field("exact", description=_KIND)


class Number(ReferenceSection):
    """1 if the answer gives the same value as the reference; else 0."""

    kind: Literal["number"] = Field("number", description=_KIND)
    by: Literal["math_verify", "last_number"] = "math_verify"
    """`math_verify`: the same mathematically, formulas too, by the package math-verify; in the answer they stand in
    `$`, `\\boxed` or the like. `last_number`: the last number of both is the same, exactly."""


class Regex(RewardSection):
    """1 if the pattern is found in the answer, or finds there what it finds in the reference; else 0."""

    kind: Literal["regex"] = Field("regex", description=_KIND)
    pattern: Annotated[str, AfterValidator(_pattern)]
    """Regular expression; `^` and `$` match at lines. With `reference`, its last hit (its first group, if it has one)
    is compared."""
    reference: str | None = None
    """Field of the row that holds the reference; default: the pattern is only to be found."""
    whole: bool = False
    """Look at all of the completion, what the model thought too; else at what follows the last `</think>`."""


class Format(RewardSection):
    """1 if the completion consists of these tags in this order, each once, and nothing else but white space, such as
    `<think>..</think><answer>..</answer>`; else 0."""

    kind: Literal["format"] = Field("format", description=_KIND)
    tags: tuple[Tag, ...] = Field(("think", "answer"), min_length=1)
    """Names of the tags, in order."""
    opened: bool = False
    """The prompt ends with the opening of the first tag, as some chat templates write it."""
    partial: bool = False
    """Give the share of the openings and closings that stand exactly once instead, whatever their order."""


class Json(RewardSection):
    """1 if the answer is one JSON value and nothing else, that fits the schema if there is one; else 0."""

    kind: Literal["json"] = Field("json", description=_KIND)
    json_schema: LocalOrHub | None = None
    """File of a JSON Schema."""
    tag: Tag | None = None
    """Look at what stands in this tag of the answer; default: all."""


class Overlong(RewardSection):
    """The soft overlong punishment of DAPO (Yu et al., arXiv:2503.14476, eq. 13): 0 up to `max_length - cache` tokens,
    then falling linearly to -1 at `max_length`, and -1 beyond."""

    kind: Literal["overlong"] = Field("overlong", description=_KIND)
    max_length: int = Field(ge=1)
    """Tokens of a completion from which the punishment is full."""
    cache: int = Field(ge=1)
    """Tokens before that over which it grows."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.cache > self.max_length:
            raise ValueError("cache is larger than max_length")
        return self


class Repetition(RewardSection):
    """Minus the share of n-grams of words that stand in the answer before already, from 0 to nearly -1; a penalty on
    repetitions as in Yeo et al., arXiv:2502.03373, over the whole answer."""

    kind: Literal["repetition"] = Field("repetition", description=_KIND)
    size: int = Field(3, ge=1)
    """Words of an n-gram."""


class Earned(RewardSection):
    """What the environment of `rollout.environment` gave for the turns of an episode, summed."""

    kind: Literal["environment"] = Field("environment", description=_KIND)


class Code(RewardSection):
    """1 if the program in the answer (its last fenced block, else all of it) passes the row's tests; else 0. A program
    that ends badly, takes too long or asks for more than it may has failed its tests.

    It runs in a process of its own, under limits, with an empty environment, in an empty folder that goes with it.
    Where Linux allows it (as root, or with user namespaces), it has no network, no other processes to see, and writes
    nowhere else. It may read what every user of the machine may. Tests that are code run in the same process as the
    answer, which could look for them there; those with input and output are compared outside.
    """

    kind: Literal["code"] = Field("code", description=_KIND)
    tests: str = "tests"
    """Field of the row that holds the tests: Python code, such as asserts, or a list of such; or
    `[{"input": ..., "output": ...}]` of a program that reads and writes; also as JSON text."""
    partial: bool = False
    """Give the share of tests that pass instead of all or nothing."""
    timeout: float = Field(10, gt=0)
    """Seconds for a program: for all tests that are code together, for each input alone."""
    memory: int = Field(512, ge=64)
    """Most MiB of memory of a process."""
    disk: int = Field(16, ge=1)
    """Most MiB of files; where the system does not allow a file system of its own, of each file."""
    processes: int = Field(1, ge=1)
    """Most processes and threads at a time."""
    output: int = Field(1024, ge=1)
    """Most KiB that a program may write to its output."""
    workers: int | None = Field(None, ge=1)
    """Programs that run at a time; default: as many as there are cores."""
    strict: bool = True
    """Refuse to run where the system does not allow all of the isolation; else run with what it allows, and warn."""


class Model(RewardSection):
    """The score of a reward model that was trained with `llm.reward`."""

    kind: Literal["model"] = Field("model", description=_KIND)
    path: LocalOrHub
    """A checkpoint of such a training, or a folder of a model as transformers' `AutoModelForSequenceClassification`
    loads it."""
    class_name: str | None = None
    """With a model of several classes: the one whose log-probability is the score."""
    tokens: int = Field(16384, ge=1)
    """Most tokens that are scored at a time."""


class Http(RewardSection):
    """The scores of a server. It is sent `{"answers": [{"prompt", "completion", "tokens", "finished", "row"}, ...]}` as
    JSON by POST, and answers `{"scores": [1.0, null, ...]}`, a number for each answer, null where there is none."""

    kind: Literal["http"] = Field("http", description=_KIND)
    url: Annotated[str, Field(pattern=r"^https?://")]
    """Address of the scorer."""
    batch: int = Field(64, ge=1)
    """Most answers in a request."""
    workers: int = Field(4, ge=1)
    """Requests at a time."""
    timeout: float = Field(60, gt=0)
    """Seconds for a request."""
    retries: int = Field(2, ge=0)
    """Further tries after a server that is not reached, takes too long or says that it is busy or broken (408, 429,
    5xx)."""
    token_variable: str | None = None
    """Name of an environment variable that holds a bearer token."""


Judge = Annotated[
    Function | Exact | Number | Regex | Format | Json | Code | Http,
    Field(discriminator="kind"),
]


class Cosine(RewardSection):
    """A reward of right and wrong answers by their length (Yeo et al., arXiv:2502.03373): it goes from `..._short` at 0
    tokens to `..._long` at `max_length` along half a cosine, so that right answers are best short, and wrong ones may
    be worth more thought. An answer that was cut gets `exceeded`."""

    kind: Literal["cosine"] = Field("cosine", description=_KIND)
    correct: Judge
    """What says whether an answer is right: a reward without further weight."""
    threshold: float = 1.0
    """Score from which an answer is right."""
    max_length: int = Field(ge=1)
    """Tokens of the longest completion."""
    right_short: float = 1.0
    """Reward of a right answer without length."""
    right_long: float = 0.5
    """Reward of a right answer of `max_length` tokens."""
    wrong_short: float = -1.0
    """Reward of a wrong answer without length."""
    wrong_long: float = -0.5
    """Reward of a wrong answer of `max_length` tokens."""
    exceeded: float = -1.0
    """Reward of an answer that was cut, or that has `max_length` tokens."""


Reward = Annotated[
    Function | Exact | Number | Regex | Format | Json | Overlong | Cosine | Repetition | Earned | Code | Model | Http,
    Field(discriminator="kind"),
]


def _distinct(value: tuple[RewardSection, ...]) -> tuple[RewardSection, ...]:
    names = [one.label for one in value]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two rewards are called {twice!r}; give one a name")
    if not any(one.weight for one in value):  # of none neither
        raise ValueError("no reward has a weight")
    return value


RewardSections = Annotated[tuple[Reward, ...], AfterValidator(_distinct)]
"""The field of a recipe."""
