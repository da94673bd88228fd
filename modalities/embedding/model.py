"""sentence-transformers' models: loading them, adapting them, and running them on texts without padding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...common import attention
from ...common.adapters import adapted
from ...common.errors import ModelError, unreadable_model
from .encode import encode
from .unpad import Unpadded, unpadded

FAMILY = "an embedding model or a transformer"

Builder = Callable[..., Any]
"""Makes a model of sentence-transformers of (path, options)."""


def load(build: Builder, section: Any, weights: Path | None, task_type: str | None = None) -> Any:
    """A model of sentence-transformers, with an adapter if the recipe has one.

    Args:
        build: called with a path and `device`, `trust_remote_code`, `local_files_only`, `model_kwargs`.
        section: the recipe's model.
        weights: directory of a saved model or adapter to load instead of starting from `model.path`.
        task_type: PEFT's name of what the transformer does; None: its forward is left as it is.

    Raises:
        ModelError: no such model there.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    attention.register()
    path = section.path if weights is None or section.lora else str(weights)
    options = {
        "device": "cpu",
        "trust_remote_code": section.trust_remote_code,
        "local_files_only": Path(path).exists(),
    }
    try:
        try:
            model = build(path, model_kwargs={"dtype": torch.float32, "attn_implementation": attention.NAME}, **options)
        except (ValueError, KeyError):  # a family that has an attention of its own
            model = build(path, model_kwargs={"dtype": torch.float32}, **options)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise unreadable_model(path, error, FAMILY) from error
    if section.lora is not None:
        model[0].model = adapted(model[0].model, section.lora, weights, task_type)
    return model


def forbid_dropped(model: Any, section: Any) -> None:
    """Raises ModelError where an adapter would leave a head of ours untrained and unsaved."""
    loose = [name for name, _ in nn.Sequential(*list(model)[1:]).named_parameters()]
    if section.lora is not None and loose:
        raise ModelError(
            "the modules after the transformer have weights of their own, which an adapter does not hold",
            where="model.lora",
            given=", ".join(loose),
            do="train the model itself",
        )


class Network(nn.Module):
    """A model of sentence-transformers on texts whose real tokens alone cost.

    Args:
        model: the modules, of which the first is the transformer.
        name: feature that is asked for: `sentence_embedding`, `token_embeddings` or `scores`.
        budget: tokens that are run at once.
        recompute: run each chunk again in the backward pass instead of keeping its activations.
    """

    def __init__(self, model: Any, name: str, budget: int, recompute: bool = False):
        super().__init__()
        self.parts = model
        self.name, self.budget, self.recompute = name, budget, recompute
        self._hooks: list[Unpadded | None] = [unpadded(self.transformer, self._probed)]
        self._freeze_unused()

    @property
    def transformer(self) -> Any:
        """The transformers model, or PEFT's around it."""
        return self.parts[0].model

    @property
    def is_padded(self) -> bool:
        """Whether the model's layers run on padding too, as they can't do without."""
        return self._hooks[0] is None

    def forward(self, texts: dict[str, Tensor], task: str | None = None) -> list[Tensor]:
        """Features of texts.

        Args:
            texts: `input_ids`, `attention_mask` [U, T], sorted by length, and what else texts have.
            task: `query` or `document`, where a module makes a difference.

        Returns:
            [the feature [U, ...], mask [U, T] of the tokens that count].
        """

        def run(**given: Tensor) -> dict[str, Tensor]:
            return self.features(given, task)

        names = (self.name, "attention_mask") if self.name == "token_embeddings" else (self.name,)
        return encode(run, names, texts, self._hooks[0], self.budget, self.recompute)

    def features(self, given: dict[str, Tensor], task: str | None = None) -> dict[str, Tensor]:
        """All that the modules make of a padded batch."""
        given = dict(given)
        prompts = given.pop("prompt_lengths", None)
        features: dict[str, Any] = self.parts[0](given)
        for module in list(self.parts)[1:]:
            if prompts is not None and not getattr(module, "include_prompt", True):
                places = torch.arange(features["attention_mask"].shape[1], device=prompts.device)
                features["attention_mask"] = features["attention_mask"] * (places[None] >= prompts[:, None])
            more = {"task": task} if "task" in getattr(module, "forward_kwargs", ()) else {}
            features = module(features, **more)
        return features

    def _freeze_unused(self) -> None:
        """Leave out of the training what the feature does not depend on, such as a pooler nobody asks for: several
        processes would wait for its gradient."""
        ids = torch.arange(1, 4)[None]
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if not trained:
            return
        found = self.features(given)[self.name]
        for parameter, gradient in zip(
            trained, torch.autograd.grad(found.sum(), trained, allow_unused=True), strict=True
        ):
            parameter.requires_grad_(gradient is not None)

    def _probed(self, ids: Tensor, mask: Tensor) -> Tensor:
        found = self.features({"input_ids": ids, "attention_mask": mask})[self.name]
        return found * mask[:, :, None] if self.name == "token_embeddings" else found
