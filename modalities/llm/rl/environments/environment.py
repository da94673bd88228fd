"""The interface of an environment, and how a recipe names one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, Protocol

from pydantic import AfterValidator, Field

from .....common.recipe import Section
from ...scoring import load_function
from ..rewards.config import function_name

Message = Mapping[str, Any]
"""As chat templates read it: `{"role": "user", "content": "..."}`."""

Step = tuple[Sequence[Message], float | None, bool]
"""(what the environment says, the reward of the turn or None, whether the episode is over)."""


class Environment(Protocol):
    """One episode. A new one is made for each completion, so it may keep what it likes. Both methods may be async: all
    episodes then wait together.

    What the environment says is read by the policy and carries no loss. An error in it takes that episode alone out of
    the training, with its reason.
    """

    tools: Sequence[Mapping[str, Any]]
    """JSON schemas that the chat template is given; may be empty."""

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """Begin.

        Args:
            row: of the data, all fields.

        Returns:
            the messages before the policy's first turn.
        """
        ...

    def step(self, message: Message) -> Step | Awaitable[Step]:
        """Answer a turn of the policy.

        Args:
            message: `{"role": "assistant", "content": ...}`, the text of the turn, without its end token.
        """
        ...


class EnvironmentSection(Section):
    """Lets the policy act in several turns."""

    entry_point: Annotated[str, AfterValidator(function_name)]
    """Class of the environment, `module:Class` or `file.py:Class`, such as
    `luthier.modalities.llm.rl.environments.calculator:Calculator`."""
    parameters: Mapping[str, Any] = Field(default_factory=dict)
    """Arguments of the class."""
    turns: int = Field(8, ge=1)
    """Most turns of the policy; an episode that has not ended then counts as cut."""
    timeout: float | None = Field(60, gt=0)
    """Seconds that an async `reset` or `step` may take; null: no bound."""

    def maker(self) -> Callable[[], Environment]:
        """Makes the environment of an episode.

        Raises:
            RecipeError: there is no such class.
        """
        kind = load_function(self.entry_point, "rollout.environment.entry_point")
        return lambda: kind(**self.parameters)
