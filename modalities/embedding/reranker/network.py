"""A causal language model as a reranker: the logit of one token less that of another, after the last token read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....common.errors import ModelError
from ..model import Network


class YesNoNetwork(Network):
    """Only the last token's hidden state is projected, and onto two tokens only.

    Args:
        model: a CrossEncoder on a causal language model.
        budget: tokens that are run at once.
        recompute: run each chunk again in the backward pass.
    """

    def __init__(self, model: Any, budget: int, recompute: bool = False):
        score = model[1]
        self._tokens = [score.true_token_id, score.false_token_id]
        super().__init__(model, "scores", budget, recompute)

    def features(self, given: dict[str, Tensor], task: str | None = None) -> dict[str, Tensor]:
        causal = self.transformer
        causal = causal.get_base_model() if hasattr(causal, "get_base_model") else causal
        decoder = getattr(causal, causal.base_model_prefix)
        mask = given["attention_mask"]
        hidden = decoder(input_ids=given["input_ids"], attention_mask=mask, use_cache=False).last_hidden_state
        last = hidden[torch.arange(len(mask), device=mask.device), mask.sum(dim=1) - 1]
        weight = causal.get_output_embeddings().weight[self._tokens]
        yes, no = (last @ weight.T.to(last.dtype)).unbind(dim=1)
        return {"scores": (yes - no)[:, None], "attention_mask": mask}


def check_logits(network: YesNoNetwork) -> None:
    """Raises ModelError if the model makes its logits in another way than by a product with its last weights."""
    mask = torch.ones(1, 4, dtype=torch.int64)
    ids = torch.arange(4)[None]
    with torch.no_grad():
        parts = network.parts.eval()
        expected = parts({"input_ids": ids, "attention_mask": mask})["scores"]
        found = network.features({"input_ids": ids, "attention_mask": mask})["scores"]
    if not torch.allclose(found, expected, rtol=1e-3, atol=1e-4):
        raise ModelError(
            "the model's logits are made in a way that is not known", where="model.path", given=type(parts).__name__
        )
