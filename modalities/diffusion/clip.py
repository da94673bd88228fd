"""How well pictures fit their prompts, as a CLIP model sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...common.errors import unreadable_model


def score(path: str, images: Sequence[Any], prompts: Sequence[str], device: torch.device) -> float:
    """CLIP score (Hessel et al., arXiv:2104.08718) as torchmetrics has it: 100 x the cosine of picture and text, at
    least 0, of each pair; their mean.

    Args:
        path: CLIP model in transformers' format.
        images: Pillow images.
        prompts: of each.
        device: that it runs on.
    """
    from transformers import CLIPModel, CLIPProcessor

    try:
        model: Any = CLIPModel.from_pretrained(path).eval()
        processor: Any = CLIPProcessor.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise unreadable_model(path, error, "a CLIP model") from error
    model = model.to(device)
    inputs = processor(text=list(prompts), images=list(images), return_tensors="pt", padding=True, truncation=True)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        said = model(**inputs.to(device))
    cosines = torch.nn.functional.cosine_similarity(said.image_embeds, said.text_embeds)
    return float(100 * cosines.clamp(min=0).mean())
