"""The parts of a recipe that the online trainings share."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ....common.recipe import LocalOrHub, Recipe, Section
from ..config import LanguageEvaluate, LanguageModel, TextData
from .engines.http import HttpSection
from .environments.environment import EnvironmentSection
from .placed.section import PlacementSection
from .rewards.config import RewardSections


class RolloutModel(LanguageModel):
    reference: LocalOrHub | None = None
    """Another model as the reference of the KL; default: the model as it is before the training. For a new adapter that
    is the model under it, without a second copy. Only with a KL."""


class PromptData(TextData):
    """Rows have `prompt`, a text or messages; or `messages`, of which the last assistant's is taken off and is the
    `answer`, unless the row has that field. All further fields are for the rewards."""

    shape: None = None
    """Rows are told apart by their keys."""
    chat_template: LocalOrHub | None = None
    """File of a chat template in place of the tokenizer's own; it is saved with the model."""
    control_tokens: Literal["refuse", "text", "token"] = "refuse"
    """A message that spells a control token such as `<|im_end|>`: leave the row out, take it as text, or as a token."""
    plain: bool = False
    """Give `prompt` strings to the model as they are, without the chat template."""


class SamplingSection(Section):
    max_new_tokens: int = Field(256, ge=1)
    """Most tokens of a completion."""
    temperature: float = Field(1.0, ge=0)
    """Of the distribution that tokens are drawn from; 0 (only in evaluations): the most probable token is taken."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Draw only from the most probable tokens with this probability in all."""
    top_k: int | None = Field(None, ge=1)
    """Draw only from so many of the most probable tokens; default: all."""


class AnswerSampling(SamplingSection):
    max_new_tokens: int | None = Field(None, ge=1)  # type: ignore[assignment]
    """Most tokens of an answer; default: `rollout.max_new_tokens`."""


class RolloutSection(SamplingSection):
    """How completions are drawn, and what is trained on them."""

    temperature: float = Field(1.0, gt=0)
    """Of the distribution that tokens are drawn from, and of all log-probabilities."""
    engine: Literal["local"] | HttpSection = "local"
    """What draws them: `local`, the model in the trainer's own process; or servers, such as `{server: vllm, urls:
    ["http://host:8000"]}`, which are given the weights before each rollout."""
    placement: PlacementSection | None = None
    """Have Ray place engines like `local`, or the rewards, in processes of their own, here or on other machines: such
    as `{address: auto, engines: {number: 4, gpus: 1}}`; default: none."""
    environment: EnvironmentSection | None = None
    """Let the policy act in several turns, with tools; default: it answers once. `max_new_tokens` is that of a turn,
    and rows may have any fields: the environment makes the prompt."""
    num_generations: int = Field(8, ge=1)
    """Completions of a prompt: the group."""
    batch: int = Field(128, ge=1)
    """Most completions that are drawn at a time on a device."""
    steps: int = Field(1, ge=1)
    """Optimizer steps that share the completions of one rollout among them."""
    iterations: int = Field(1, ge=1)
    """Passes over the completions of a rollout."""
    correction: Literal["none", "token", "completion"] = "none"
    """Weigh the loss of a token by trainer's / engine's probability of it, or of its whole completion, for an engine
    that computes otherwise than the trainer (truncated importance sampling, as in Yao et al., "Your efficient RL
    framework secretly brings you off-policy RL training", 2025)."""
    correction_cap: float = Field(2.0, gt=0)
    """Largest such weight."""
    record: bool = True
    """Write all completions with their rewards to `OUTPUT/rollouts/*.parquet`."""


class KLSection(Section):
    weight: float = Field(0.0, ge=0)
    """Strength of the penalty (beta); 0: there is no reference."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """How it is estimated on a token; see `losses/kl.py`."""
    place: Literal["loss", "reward"] | None = None
    """A term of the loss, or taken from the reward; default: as is usual with the loss."""


class OnlineEvaluate(LanguageEvaluate):
    """The model answers the prompts of the evaluation sets, and the rewards judge the answers."""

    generate: None = None
    """Answers are judged by the rewards."""
    answers: int = Field(1, ge=1)
    """Answers to each prompt."""
    sampling: AnswerSampling = AnswerSampling(temperature=0.0)
    """How they are drawn; default: the most probable tokens."""
    pass_at: tuple[Annotated[int, Field(ge=1)], ...] = (1,)
    """Values k of the metrics `pass@k`: the probability that one of k answers passes, estimated without bias from all
    of them (Chen et al., arXiv:2107.03374)."""
    pass_reward: float = 1.0
    """Total reward from which an answer passes."""

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if max(self.pass_at, default=1) > self.answers:
            raise ValueError(f"pass@{max(self.pass_at)} needs as many answers; raise evaluate.answers")
        if self.answers > 1 and self.sampling.temperature == 0:
            raise ValueError("several answers are all the same at temperature 0; set evaluate.sampling.temperature")
        return self


class OnlineRecipe(Recipe):
    """What recipes of online reinforcement learning have in common."""

    model: RolloutModel
    """What it starts from, and which parts are trained."""
    data: PromptData
    """The prompts that it is trained and evaluated on. `max_length` is that of a prompt with its completion."""
    rollout: RolloutSection = RolloutSection()
    """How completions are drawn, and what is trained on them."""
    rewards: RewardSections
    """What completions are worth: a sum of rewards by weight."""
    evaluate: OnlineEvaluate = OnlineEvaluate()
    """Evaluation during training and by `luthier evaluate`."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.data.streaming:
            raise ValueError("data.streaming is not known here: prompts are read at once")
        if self.rollout.max_new_tokens >= self.data.max_length:
            raise ValueError("data.max_length, of a prompt with its completion, is no more than rollout.max_new_tokens")
        acts = self.rollout.environment is not None
        if acts and self.data.plain:
            raise ValueError("data.plain: an environment speaks through the chat template")
        if not acts and any(one.kind == "environment" for one in self.rewards):
            raise ValueError("rewards: the kind environment needs rollout.environment")
        engine, placed = self.rollout.engine, self.rollout.placement
        places_engines = placed is not None and placed.engines is not None
        if places_engines and engine != "local":
            raise ValueError("rollout.placement.engines: servers draw already; leave it or rollout.engine out")
        if self.train.tensor_parallel and (places_engines or engine != "local"):
            raise ValueError("train.tensor_parallel: only the trainer's own model draws then; use rollout.engine=local")
        return self

    @property
    def most_tokens(self) -> int:
        """Most tokens that the policy can say after a prompt."""
        acts = self.rollout.environment
        turns = 1 if acts is None else acts.turns
        return min(turns * self.rollout.max_new_tokens, self.data.max_length)

    @property
    def evaluated(self) -> SamplingSection:
        """How answers are drawn in evaluations."""
        section = self.evaluate.sampling
        most = self.rollout.max_new_tokens if section.max_new_tokens is None else section.max_new_tokens
        return section.model_copy(update={"max_new_tokens": most})
