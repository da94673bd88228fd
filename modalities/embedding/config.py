"""The parts of a recipe that every training of an embedding model or reranker shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ...common.recipe import (
    BatchSection,
    DataSection,
    EvaluateSection,
    ModelSection,
    Recipe,
    Section,
    Source,
    TaskSection,
    listed_sources,
)
from .roles import layout_of_roles


class PromptSection(Section):
    """What stands before each text, in training, in evaluation and in the saved model."""

    query: str | None = None
    """Before a query, such as `query: `; default: the prompt that the model was saved with, if there is one."""
    document: str | None = None
    """Before a document, such as `passage: `; default: the prompt that the model was saved with, if there is one."""


Columns = str | tuple[str, ...] | None


class RolesSection(Section):
    """Which column is what. Together they form one of the layouts that are known by name; all other columns can only be
    slices."""

    anchor: str | None = None
    """Column of the query, along with `positive`."""
    query: str | None = None
    """Column of the query, along with `positive`, `document` or `documents`."""
    positive: Columns = None
    """Column or columns of the documents that belong to the query."""
    negatives: Columns = None
    """Column or columns of documents that don't."""
    document: str | None = None
    """Column of a document, along with `query` and `label`."""
    documents: Columns = None
    """Column of a list of documents, or several columns, along with `query` and `labels`."""
    sentence1: str | None = None
    """Column of the first of two texts, along with `sentence2` and `score` or `label`."""
    sentence2: str | None = None
    """Column of the second of two texts."""
    text: str | None = None
    """Column of a text alone, along with `label`."""
    label: str | None = None
    """Column of the relevance of `document`, or of the class of two texts or of one."""
    labels: Columns = None
    """Column of a list of the relevance of each of `documents`, or several columns."""
    score: str | None = None
    """Column of the similarity of two texts, or of a teacher's score of `document`."""
    scores: Columns = None
    """Column of a list of a teacher's scores, positives first, or several columns."""

    def declared(self) -> dict[str, str | tuple[str, ...]]:
        """Columns by role."""
        return {name: column for name, column in self if column is not None}

    @model_validator(mode="after")
    def _forms_a_layout(self) -> Self:
        layout_of_roles(self.declared())
        return self


class EmbeddingSource(Source):
    roles: RolesSection | None = None
    """Which column is what, as `{anchor: title, positive: body, negatives: [a, b]}`; default: told by the columns'
    names."""
    query_prompt: str | None = None
    """Prompt of this data set's queries; default: `data.prompts.query`."""
    document_prompt: str | None = None
    """Prompt of this data set's documents; default: `data.prompts.document`."""


EmbeddingSources = Annotated[tuple[EmbeddingSource, ...], BeforeValidator(listed_sources)]


class EmbeddingBatch(BatchSection):
    examples: int = Field(32, ge=1)
    """Rows in a batch. The other rows' documents are each query's negatives, so this is part of the loss."""
    bucket_batches: int = Field(0, ge=0)
    """Always 0: which texts form a batch is never chosen by their length."""
    chunk_tokens: int = Field(16384, ge=1)
    """The texts of a batch are sorted by length and run through the model in chunks of at most so many tokens, padding
    included. It changes speed and memory only."""

    @model_validator(mode="before")
    @classmethod
    def _no_tokens(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and "tokens" in value:
            raise ValueError(
                "a batch is bounded by its examples, as they are each other's negatives; chunk_tokens bounds what runs "
                "through the model at once"
            )
        return value

    @model_validator(mode="after")
    def _no_buckets(self) -> Self:
        if self.bucket_batches:
            raise ValueError("bucket_batches must be 0: batches of similar lengths would be other negatives")
        return self


class EmbeddingData(DataSection):
    train: EmbeddingSources = Field(min_length=1)
    """Training data: a path, `{path, weight, name, roles, loss, ...}` or a list of them. A batch is of one of them."""
    validation: EmbeddingSources = ()
    """Data for the evaluation during training, in the same forms."""
    regression: EmbeddingSources = ()
    """Data of what the model is not to forget, evaluated along with `validation`, as the metrics `regression/...`."""
    test: EmbeddingSources = ()
    """Data for `luthier evaluate CHECKPOINT test`, in the same forms."""
    batch: EmbeddingBatch = EmbeddingBatch()
    """Size of one batch on one device."""
    max_length: int | None = Field(None, ge=2)
    """Longest text with its prompt, in tokens; the end of a longer one is cut, counted and reported. Default: the
    model's own limit."""
    query_max_length: int | None = Field(None, ge=2)
    """Longest query, in tokens; default: `max_length`. A reranker reads both together and has `max_length` only."""
    prompts: PromptSection = PromptSection()
    """What stands before each text; saved with the model."""


class EncoderModel(ModelSection):
    """The transformer that texts run through."""


class EmbeddingModel(EncoderModel):
    pooling: Literal["mean", "cls", "last", "max"] | None = None
    """How the tokens' vectors become one; default: the model's own, and the mean for a model that has none."""
    normalize: bool | None = None
    """Scale embeddings to length 1; default: as the model does."""
    dimensions: int | None = Field(None, ge=1)
    """Keep only the first dimensions of each embedding, in training and in the saved model; default: all."""


class RerankerModel(EncoderModel):
    template: str | None = None
    """For a reranker made of a causal language model: what it reads, with `{query}` and `{document}` and, if wanted,
    `{instruction}` in their places. Absent: query and document as the tokenizer joins a pair."""
    instruction: str = ""
    """What a document is to be judged by, put into the template."""
    true_token: str = "yes"
    """With a template: the token whose logit, less that of `false_token`, is the relevance."""
    false_token: str = "no"
    """With a template: the token that says that the document is not relevant."""

    @field_validator("template")
    @classmethod
    def _has_places(cls, value: str | None) -> str | None:
        if value is not None and not (value.count("{document}") == 1 and "{query}" in value.partition("{document}")[0]):
            raise ValueError("the template needs {query} and, after it, {document}, once")
        return value


class EmbeddingTask(TaskSection):
    """A kind adds its losses."""


Metric = Literal["retrieval", "similarity", "triplet", "reranking", "classification", "clustering"]


class EmbeddingEvaluate(EvaluateSection):
    metrics: tuple[Metric, ...] = Field(("retrieval",), min_length=1)
    """What is measured: `retrieval` (each query among all documents of the set), `similarity` (correlation with the
    rows' scores), `triplet` (positive nearer than negative), `reranking` (each query among its own documents), and the
    probes `classification` and `clustering` of rows with a text and a label."""
    at: tuple[Annotated[int, Field(ge=1)], ...] = Field((1, 3, 5, 10, 100), min_length=1)
    """Numbers of best documents that retrieval and reranking look at."""
    dimensions: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Also measure embeddings cut to these numbers of dimensions."""
    quantized: tuple[Literal["int8", "binary"], ...] = ()
    """Also measure embeddings in these number formats."""
    mteb: tuple[str, ...] = ()
    """Tasks of MTEB by name, run at each evaluation, each giving the metric `mteb/<task>`; their data are fetched."""
    slices: tuple[str, ...] = ("source",)
    """Fields by which metrics are also given: `source`, or any field of the rows."""
    batch: int = Field(32, ge=1)
    """Rows in an evaluation batch; no metric depends on it."""


class EmbeddingRecipe(Recipe):
    """What the recipes of embedding models and rerankers have in common."""

    task: EmbeddingTask
    """What is trained: the task kind and its loss."""
    model: EncoderModel
    """What it starts from, and which parts are trained."""
    data: EmbeddingData
    """What it is trained and evaluated on, and what stands before each text."""
    evaluate: EmbeddingEvaluate = EmbeddingEvaluate()
    """Evaluation during training and by `luthier evaluate`."""
