"""The modules after the transformer, as the recipe wants them."""

from __future__ import annotations

from typing import Any

from torch import nn


def arranged(model: Any, section: Any, similarity: str) -> Any:
    """A SentenceTransformer with the recipe's pooling, normalisation, size and similarity.

    Args:
        model: as it was loaded.
        section: the recipe's model; where it says nothing, the model's own modules stay.
        similarity: how its embeddings are compared.
    """
    from sentence_transformers.base.modules import Normalize
    from sentence_transformers.sentence_transformer.modules import Pooling

    parts: list[nn.Module] = list(model)
    if section.pooling is not None:
        mode = {"last": "lasttoken"}.get(section.pooling, section.pooling)
        pooling = Pooling(parts[0].get_embedding_dimension(), pooling_mode=mode)  # type: ignore[operator]
        at = next((i for i, part in enumerate(parts) if isinstance(part, Pooling)), None)
        parts[1:1] = [pooling] if at is None else []
        if at is not None:
            parts[at] = pooling
    if section.normalize is not None:
        parts = [part for part in parts if not isinstance(part, Normalize)]
        parts += [Normalize()] if section.normalize else []
    if section.pooling is not None or section.normalize is not None:
        model = type(model)(modules=parts, device="cpu", prompts=model.prompts)
    model.truncate_dim = section.dimensions or model.truncate_dim
    model.similarity_fn_name = similarity
    return model
