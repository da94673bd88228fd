"""Contrastive losses: a query's own document against all others (multiple negatives, InfoNCE, GIST).

Scores are similarities divided by the temperature. Which documents are positives, and which may be negatives, is given
by masks, so that duplicates, known positives, several positives, ragged negatives and "no in-batch negatives" are all
the same function. What a step counts is the number of queries with a positive, `positive.any(1).sum()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

Kind = Literal["cosine", "dot"]
Direction = Literal["query_to_query", "document_to_query", "document_to_document"]


def similarities(queries: Tensor, documents: Tensor, kind: Kind = "cosine") -> Tensor:
    """Similarity of each query with each document.

    Computed in float32 at least, under autocast too: divided by a temperature of 0.05, the 8 bits of bfloat16 would
    tell scores apart only in steps of 0.08.

    Args:
        queries: [Q, D]
        documents: [M, D]
        kind: cosine or inner product.

    Returns:
        [Q, M]
    """
    wide = torch.promote_types(torch.promote_types(queries.dtype, documents.dtype), torch.float32)
    with torch.autocast(queries.device.type, enabled=False):
        queries, documents = queries.to(wide), documents.to(wide)
        if kind == "cosine":
            queries, documents = functional.normalize(queries, dim=-1), functional.normalize(documents, dim=-1)
        return queries @ documents.T


def contrastive(scores: Tensor, positive: Tensor, candidate: Tensor, hardness: Tensor | None = None) -> Tensor:
    """Softmax cross-entropy of the positive among the negatives (van den Oord et al., arXiv:1807.03748; Henderson et
    al., arXiv:1705.00652).

    A query with positives P and negatives N, those candidates that are no positives, has the loss

        mean over p in P of  -log( exp(s_p) / (exp(s_p) + sum over n in N of exp(s_n)) )
        =  mean over p in P of  softplus( logsumexp over N of s_n  -  s_p )

    so positives never push each other away. Without negatives it is 0 (and so is its gradient), without positives too.
    The same function on the transposes is the direction from document to query, whose rows without a positive are 0.

    Args:
        scores: [Q, M] similarity / temperature.
        positive: [Q, M] bool, documents that belong to the query.
        candidate: [Q, M] bool, documents that may count as negatives; positives may be in it or not.
        hardness: [Q, M] what is added to the scores of negatives only, see `hardness_of`.

    Returns:
        [Q] loss of each query, in nats.
    """
    negative = candidate & ~positive
    others = scores if hardness is None else scores + hardness
    lowest = torch.finfo(scores.dtype).min / 4  # finite, so that a query without negatives has a gradient of 0, not NaN
    against = torch.where(negative, others, lowest).logsumexp(dim=1, keepdim=True)
    losses = functional.softplus(against - scores).masked_fill(~positive, 0.0)
    return losses.sum(dim=1) / positive.sum(dim=1).clamp(min=1)


def hardness_of(similarity: Tensor, strength: float, where: Tensor | None = None) -> Tensor:
    """What makes hard negatives count more: exp(strength x similarity) times as much, with no gradient of its own
    (Lan et al., arXiv:2503.04812, eq. 5, on the other queries' documents; EmbeddingGemma, arXiv:2509.20354, on the
    mined ones).

    Args:
        similarity: [Q, M], not divided by the temperature.
        strength: the papers' alpha: 9 and 5.
        where: [Q, M] bool, the negatives that are weighed; default: all.
    """
    penalty = strength * similarity.detach()
    return penalty if where is None else penalty.masked_fill(~where, 0.0)


def known_positives(document_keys: Tensor, known: Tensor) -> Tensor:
    """Where a document is a positive of the query by its text, whichever row it came from; so it is no negative.

    Args:
        document_keys: [M] int64 text ids.
        known: [Q, K] int64 text ids of each query's positives, filled up with -1.

    Returns:
        [Q, M] bool
    """
    found = torch.zeros(len(known), len(document_keys), dtype=torch.bool, device=known.device)
    for keys in known.T:  # one column at a time: [Q, M] of memory, not [Q, M, K]
        found |= (keys[:, None] == document_keys) & (keys[:, None] != -1)
    return found


def false_negatives(similarity: Tensor, positive: Tensor, margin: float = 0.0, relative: bool = False) -> Tensor:
    """Documents so similar to the query that they are taken for positives that nobody marked (NV-Retriever,
    arXiv:2407.15831): more similar than the positive less a margin. A negative margin allows for more than the positive
    has; -0.1 is that of Qwen3-Embedding (arXiv:2506.05176).

    Of several positives the most similar decides, as a positive that the model does not find yet would else leave no
    negatives. Positives themselves are never in the result.

    Args:
        similarity: [Q, M], not divided by the temperature; of the model itself or of a guide.
        positive: [Q, M] bool
        margin: in units of similarity, or a share of |positive's similarity| if `relative`.

    Returns:
        [Q, M] bool; nothing for a query without positives.
    """
    best = similarity.detach().masked_fill(~positive, -torch.inf).amax(dim=1, keepdim=True)
    bound = best - (best.abs() if relative else 1.0) * margin
    return (similarity.detach() > bound) & ~positive & positive.any(dim=1, keepdim=True)


def guided(
    scores: Tensor, positive: Tensor, candidate: Tensor, guide: Tensor, margin: float = 0.0, relative: bool = False
) -> Tensor:
    """GISTEmbed (Solatorio, arXiv:2402.16829): `contrastive` without the candidates that a guide model finds more
    similar to the query than its positive less a margin.

    Args:
        guide: [Q, M] the guide's similarities, not divided by a temperature.
        margin: see `false_negatives`, as `relative`.

    Returns:
        [Q] loss of each query, in nats.
    """
    return contrastive(scores, positive, candidate & ~false_negatives(guide, positive, margin, relative))


class Pairs(NamedTuple):
    """Similarities [Q, C] of queries with all they are compared with, and the masks that belong to them."""

    similarity: Tensor
    positive: Tensor
    candidate: Tensor


def joint(
    queries: Tensor,
    documents: Tensor,
    positive: Tensor,
    candidate: Tensor,
    own: Tensor,
    directions: Sequence[Direction],
    kind: Kind = "cosine",
    same_query: Tensor | None = None,
) -> Pairs:
    """Further comparisons in the same softmax (the improved contrastive loss of GTE, Li et al., arXiv:2308.03281, with
    all three directions): `contrastive` of what this returns, its similarities divided by the temperature.

    With q a query, d its (first) positive document: query_to_query adds other queries to q's negatives,
    document_to_query the similarities of d with every query (with q too, as in the paper's partition function),
    document_to_document those of d with documents of other queries.

    Args:
        queries: [Q, D]
        documents: [M, D]
        positive: [Q, M] bool; a query without one has loss 0, whatever it is compared with.
        candidate: [Q, M] bool, documents that may be negatives.
        own: [Q, M] bool, the documents that the query brought, positives and mined negatives.
        same_query: [Q, Q] bool, queries of the same text, which are no negatives of each other.

    Returns:
        [Q, M + Q x (query directions) + M x (document direction)]
    """
    first = positive.int().argmax(dim=1)
    itself = torch.eye(len(queries), dtype=torch.bool, device=queries.device)
    same = itself if same_query is None else itself | same_query
    blocks = [similarities(queries, documents, kind)]
    negatives = [candidate]
    if "query_to_query" in directions:
        blocks.append(similarities(queries, queries, kind))
        negatives.append(~same)
    if "document_to_query" in directions:
        blocks.append(similarities(documents[first], queries, kind))
        negatives.append((candidate[:, first].T & ~(positive[:, first].T | same)) | itself)
    if "document_to_document" in directions:
        blocks.append(similarities(documents[first], documents, kind))
        negatives.append(candidate & ~own & ~positive)
    more = sum(block.shape[1] for block in blocks) - positive.shape[1]
    return Pairs(torch.cat(blocks, 1), functional.pad(positive, (0, more)), torch.cat(negatives, 1))
