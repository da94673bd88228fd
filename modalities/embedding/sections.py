"""The losses that a recipe can name, one section each; `losses/` holds the functions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from ...common.recipe import LocalOrHub, Section


class ContrastiveLoss(Section):
    """Multiple negatives: each query's own documents against all others of the batch (InfoNCE)."""

    name: Literal["contrastive"] = "contrastive"
    """Of the loss."""
    temperature: float = Field(0.05, gt=0)
    """What similarities are divided by."""
    in_batch_negatives: bool = True
    """Take other queries' documents as negatives; false: only those that the row gives."""
    symmetric: bool = False
    """Also ask of each positive document which query is its own; the loss is the mean of both directions."""
    hardness: float = Field(0.0, ge=0)
    """Weight of hard negatives: each negative counts exp(hardness x its similarity) (arXiv:2509.20354); 0: alike."""
    margin: float | None = None
    """A negative more similar to the query than its positive less this margin is taken for a false one and left out."""
    relative_margin: bool = False
    """`margin` is a share of the positive's similarity."""
    gather: bool = True
    """Take the documents of all ranks as negatives."""
    guide: LocalOrHub | None = None
    """A frozen model (its directory) that names false negatives: those it finds more similar than the positive (GIST,
    arXiv:2402.16829). It reads the same tokens, and each rank then keeps to its own documents."""


class CosentLoss(Section):
    """Order of similarities as of the scores (CoSENT)."""

    name: Literal["cosent"] = "cosent"
    """Of the loss."""
    scale: float = Field(20.0, gt=0)
    """What similarities are multiplied by."""


class AngleLoss(Section):
    """CoSENT on angles in complex space (AnglE, arXiv:2309.12871)."""

    name: Literal["angle"] = "angle"
    """Of the loss."""
    scale: float = Field(20.0, gt=0)
    """What angles are multiplied by."""


class CosineLoss(Section):
    """Squared difference of cosine similarity and score."""

    name: Literal["cosine"] = "cosine"
    """Of the loss."""


class MarginContrastiveLoss(Section):
    """Pairs of label 1 close to each other, those of label 0 a margin apart (Hadsell et al., 2006)."""

    name: Literal["margin_contrastive"] = "margin_contrastive"
    """Of the loss."""
    margin: float = Field(0.5, gt=0)
    """Cosine distance that pairs of label 0 are to keep."""


class TripletLoss(Section):
    """Each negative a margin further from the query than the positive."""

    name: Literal["triplet"] = "triplet"
    """Of the loss."""
    distance: Literal["cosine", "euclidean"] = "cosine"
    """How distance is measured."""
    margin: float = Field(0.3, gt=0)
    """Difference of distances that is asked for."""


class SoftmaxLoss(Section):
    """A classifier over both embeddings and their difference (SBERT, arXiv:1908.10084); it is saved in `state/`."""

    name: Literal["softmax"] = "softmax"
    """Of the loss."""
    classes: int = Field(3, ge=2)
    """Number of classes; labels are 0, 1, ..."""


class MarginMSELoss(Section):
    """Differences of similarities as a teacher's (arXiv:2010.02666)."""

    name: Literal["margin_mse"] = "margin_mse"
    """Of the loss."""


class KLLoss(Section):
    """The distribution over a query's documents as a teacher's."""

    name: Literal["kl"] = "kl"
    """Of the loss."""
    temperature: float = Field(1.0, gt=0)
    """What both sides' scores are divided by."""


def _named(value: Any) -> Any:
    """`cosent` stands for `{name: cosent}`."""
    return {"name": value} if isinstance(value, str) else value


def _contrastive(value: Any) -> Any:
    value = _named(value)
    return {"name": "contrastive", **value} if isinstance(value, dict) else value


Loss = Annotated[
    ContrastiveLoss
    | CosentLoss
    | AngleLoss
    | CosineLoss
    | MarginContrastiveLoss
    | TripletLoss
    | SoftmaxLoss
    | MarginMSELoss
    | KLLoss,
    Field(discriminator="name"),
]
"""Loss of a model that gives one vector for a text."""

AnyLoss = Annotated[Loss, BeforeValidator(_contrastive)]

ScoreLoss = Annotated[
    Annotated[ContrastiveLoss | MarginMSELoss | KLLoss, Field(discriminator="name")], BeforeValidator(_contrastive)
]
"""Loss that sees no more than similarities of queries and documents."""


class Matryoshka(Section):
    """The loss on beginnings of the embedding too, so that it can be cut (arXiv:2205.13147)."""

    dimensions: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1)
    """Sizes, such as [384, 192, 96]."""
    weights: tuple[float, ...] | None = None
    """Of each size; default: all 1."""

    @model_validator(mode="after")
    def _one_each(self) -> Matryoshka:
        if self.weights is not None and len(self.weights) != len(self.dimensions):
            raise ValueError("give a weight for each of the dimensions")
        return self


class PointwiseLoss(Section):
    """Each pair by itself: binary cross-entropy of its label, a probability."""

    name: Literal["bce"] = "bce"
    """Of the loss."""
    positive_weight: float = Field(1.0, gt=0)
    """Weight of label 1 against label 0."""


class ClassLoss(Section):
    """Each pair by itself: cross-entropy of its class, for models with several labels."""

    name: Literal["cross_entropy"] = "cross_entropy"
    """Of the loss."""
    classes: int = Field(3, ge=2)
    """Number of classes; labels are 0, 1, ..."""


class SquaredLoss(Section):
    """Each pair by itself: squared difference of logit and score (a teacher's, where the rows give one)."""

    name: Literal["mse"] = "mse"
    """Of the loss."""


class PairMarginLoss(Section):
    """Differences of logits as a teacher's (arXiv:2010.02666)."""

    name: Literal["margin_mse"] = "margin_mse"
    """Of the loss."""


class LambdaLoss(Section):
    """Pairs of a list weighed by what their exchange would cost (LambdaLoss, Wang et al., 2018)."""

    name: Literal["lambda"] = "lambda"
    """Of the loss."""
    weighing: Literal["none", "ndcg1", "ndcg2", "lambda_rank", "ndcg2++"] = "ndcg2++"
    """Weights of the pairs."""
    k: int | None = Field(None, ge=1)
    """Only the first so many places count."""
    sigma: float = Field(1.0, gt=0)
    """Steepness of the pairwise loss."""


class ListNetLoss(Section):
    """Distribution over a list as its labels' (ListNet, Cao et al., 2007)."""

    name: Literal["listnet"] = "listnet"
    """Of the loss."""


class ListMLELoss(Section):
    """Probability of the labels' order (ListMLE, Xia et al., 2008)."""

    name: Literal["listmle"] = "listmle"
    """Of the loss."""
    position_aware: bool = False
    """Weigh the first places more (p-ListMLE)."""


class RankNetLoss(Section):
    """Each pair of a list by itself (RankNet, Burges et al., 2005)."""

    name: Literal["ranknet"] = "ranknet"
    """Of the loss."""
    sigma: float = Field(1.0, gt=0)
    """Steepness."""


class GroupSoftmaxLoss(Section):
    """The positive of a list among all of the list."""

    name: Literal["group_softmax"] = "group_softmax"
    """Of the loss."""
    temperature: float = Field(1.0, gt=0)
    """What logits are divided by."""


RerankLoss = Annotated[
    Annotated[
        PointwiseLoss
        | ClassLoss
        | SquaredLoss
        | PairMarginLoss
        | LambdaLoss
        | ListNetLoss
        | ListMLELoss
        | RankNetLoss
        | GroupSoftmaxLoss,
        Field(discriminator="name"),
    ],
    BeforeValidator(_named),
]
"""Loss of a reranker."""
