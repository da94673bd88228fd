"""The parts of a recipe that every training of a language model shares."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from ...common.recipe import (
    BatchSection,
    DataSection,
    EvaluateSection,
    LocalOrHub,
    ModelSection,
    Quantization,
    Recipe,
    Section,
    TaskSection,
    absolute_if_local,
)


def _task_file(value: str) -> str:
    """A file becomes absolute, so that the saved recipe works from any folder; a name stays."""
    return absolute_if_local(value) if value.endswith((".yaml", ".yml")) else value


class LanguageModel(ModelSection):
    adapter: LocalOrHub | None = None
    """Directory of a saved adapter of the model at `path`, which is trained further; its own rank and layers stay."""
    quantization: Quantization = "none"
    """Keep the frozen base in 4 bits (QLoRA, arXiv:2305.14314); needs `lora` or `adapter`, and is slow on a CPU."""
    kernels: Literal["torch", "liger"] = "torch"
    """Norms, rotary positions and gated layers by torch, or by Liger's fused kernels, which need a CUDA device."""
    new_tokens: tuple[str, ...] = ()
    """Special tokens added to the vocabulary; each begins as the mean of the tokens that spelled it before."""

    @property
    def adapts(self) -> bool:
        """Whether an adapter is trained, a new one or a saved one, and the model at `path` is frozen."""
        return self.lora is not None or self.adapter is not None

    @model_validator(mode="after")
    def _one_adapter(self) -> Self:
        if self.adapter is not None and (self.lora is not None or self.new_tokens):
            raise ValueError("a saved adapter is trained as it is; give it without lora and new_tokens")
        return self


class TokenBatch(BatchSection):
    tokens: int | None = Field(None, ge=1)
    """Most tokens in a batch. Documents stand one after the other, so none of them is padding."""
    packing: bool = False
    """Fill each batch with the documents that fit best into `tokens`, whatever their number."""

    @property
    def packed(self) -> bool:
        return self.packing

    def budget(self) -> float | None:
        return self.tokens

    @model_validator(mode="after")
    def _has_a_size(self) -> Self:
        if self.packing and self.tokens is None:
            raise ValueError("packing needs data.batch.tokens, the size of a batch")
        return self


class LengthSection(Section):
    """What becomes of examples that are longer than `data.max_length`; all that is cut is counted."""

    turns: Literal["drop", "keep"] = "drop"
    """Drop the oldest exchanges of a conversation first, or keep all."""
    prompt: Literal["left", "right", "keep"] = "left"
    """Side at which what users, tools and documents say is cut; system messages and what the template writes never."""
    answer: Literal["right", "keep"] = "keep"
    """Cut the end of an answer, or leave the example out when its answer does not fit."""


class TextData(DataSection):
    batch: TokenBatch = TokenBatch()
    """Bounds of one batch on one device."""
    max_length: int = Field(2048, ge=2)
    """Longest example, in tokens."""
    shape: Literal["text", "messages", "prompt_completion", "alpaca", "sharegpt"] | None = None
    """Shape of the rows; default: told by their keys, row by row."""


class ChatData(TextData):
    too_long: LengthSection = LengthSection()
    """What becomes of examples that are longer than `max_length`."""
    chat_template: LocalOrHub | None = None
    """File of a chat template in place of the tokenizer's own; it is saved with the model."""
    roles: tuple[str, ...] = ("assistant",)
    """Roles whose messages carry loss; a row's own `train` or `weight` comes first."""
    turns: Literal["all", "last"] = "all"
    """Messages of these roles that carry loss: all, or those after the last message of a user."""
    control_tokens: Literal["refuse", "text", "token"] = "refuse"
    """A message that spells a control token such as `<|im_end|>`: leave the row out, take it as text, or as a token."""
    keep_lost: bool = False
    """Accept rows of which the template leaves a message without loss out, as some do with the system's."""
    plain: bool = False
    """Train `prompt` and `completion` strings as plain text, without the chat template."""


class LossSection(Section):
    """The loss of a token, and what is added to it."""

    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Probability mass spread over the vocabulary."""
    z_weight: float = Field(0.0, ge=0)
    """Weight of the squared log-partition, which keeps logits from drifting (arXiv:2204.02311)."""
    dynamic: bool = False
    """Weigh each token by its own probability (DFT, arXiv:2508.05629)."""


class LanguageTask(TaskSection):
    loss: LossSection = LossSection()
    """The loss of a token."""
    neftune_alpha: float = Field(0.0, ge=0)
    """Uniform noise on the embeddings in training, of alpha / sqrt(tokens x width) at most (arXiv:2310.05914)."""


class HarnessSection(Section):
    """Benchmarks of the field, by lm-evaluation-harness (`pip install "luthier[harness]"`); each gives metrics
    `harness/<task>/<metric>`."""

    tasks: tuple[Annotated[str, AfterValidator(_task_file)], ...] = Field(min_length=1)
    """Names of tasks and groups of the harness, such as `hellaswag`, or YAML files of your own tasks."""
    limit: int | None = Field(None, ge=1)
    """Most examples of a task; default: all."""
    num_fewshot: int | None = Field(None, ge=0)
    """Examples shown to the model before each question; default: as the task has it."""
    chat_template: bool = False
    """Ask through the chat template of the model."""


class LanguageEvaluate(EvaluateSection):
    slices: tuple[str, ...] = ("source",)
    """Fields by which metrics are also given: `source`, or any field of the rows."""
    harness: HarnessSection | None = None
    """Benchmarks that are run along with `validation`; absent: none."""


SCORES = ("exact_match", "contains", "regex", "numeric", "math_verify", "json")
"""Scores of answers that are known by name; see `scoring`."""


def score_name(given: str) -> str:
    """The name of the metric that a score gives: a known one's own, or that of the user's function."""
    return given.rpartition(":")[2]


def _score(value: str) -> str:
    """A known score, or `module:function`; a file becomes absolute, so that the saved recipe works from any folder."""
    place, sign, name = value.rpartition(":")
    if not sign and value not in SCORES:
        raise ValueError(f"one of {', '.join(SCORES)}, or your own function as module:function or file.py:function")
    if sign and (not place or not name.isidentifier() or name in (*SCORES, "loss", "accuracy")):
        raise ValueError("not module:function or file.py:function, with a name of its own")
    return f"{absolute_if_local(place)}:{name}" if sign else value


class GenerateSection(Section):
    """Answers of the model to the prompts of an evaluation set, and how they are scored.

    A prompt is a conversation up to its last assistant's message, which is the reference.
    """

    scores: tuple[Annotated[str, AfterValidator(_score)], ...] = Field(("exact_match",), min_length=1)
    """Scores of an answer, each a metric: `exact_match` (but for white space); `contains` the reference; `regex`;
    `numeric` (the last number of both is the same); `math_verify` (the same mathematically); `json` (valid); or a
    function of yours, `module:function` or `file.py:function`, that is called with answer, reference and the row's
    further fields and returns a number, the larger the better."""
    pattern: str | None = None
    """Regular expression of the score `regex`; its last hit, or that hit's first group, is what is compared."""
    json_schema: LocalOrHub | None = None
    """File of a JSON Schema that the score `json` asks for."""
    max_new_tokens: int = Field(256, ge=1)
    """Most tokens of an answer."""
    num_beams: int = Field(1, ge=1)
    """Beams of the search; 1 is greedy."""
    temperature: float = Field(0.0, ge=0)
    """0: the most probable token is taken; else it is drawn from the whole distribution at this temperature."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        names = [score_name(given) for given in self.scores]
        if len(set(names)) < len(names):
            raise ValueError("two scores have the same name")
        if ("regex" in names) != (self.pattern is not None):
            raise ValueError("the score regex and its pattern go together")
        if self.json_schema is not None and "json" not in names:
            raise ValueError("json_schema needs the score json")
        if self.temperature and self.num_beams > 1:
            raise ValueError("give either temperature or num_beams")
        return self

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        return value


class ChatEvaluate(LanguageEvaluate):
    generate: GenerateSection | None = None
    """Let the model answer the prompts of the evaluation sets; absent: loss and accuracy only."""


class LanguageRecipe(Recipe):
    """What the recipes of language models have in common."""

    task: LanguageTask
    """What is trained: the task kind and its loss."""
    model: LanguageModel
    """What it starts from, and which parts are trained."""
    evaluate: LanguageEvaluate = LanguageEvaluate()
    """Evaluation during training and by `luthier evaluate`."""
