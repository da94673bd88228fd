"""How well pictures fit their prompts, and how good they look, as a CLIP model sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import cosine_similarity

from ...common.errors import unreadable_model

METRICS = {"clip_score": "max", "clip_iqa": "max"}
GOOD, BAD = "Good photo.", "Bad photo."
"""What pictures are compared with, in the words of the paper and of torchmetrics' prompt `quality`."""


def scores(path: str, images: Sequence[Any], prompts: Sequence[str], device: torch.device) -> dict[str, float]:
    """Means over pictures:

    - `clip_score` (Hessel et al., arXiv:2104.08718), as torchmetrics has it: 100 x the cosine of picture and prompt, at
      least 0;
    - `clip_iqa` (Wang et al., arXiv:2207.12396), as torchmetrics has it: the share of exp(100 x the cosine) that "Good
      photo." has beside "Bad photo.".

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
    texts = [*prompts, GOOD, BAD]
    inputs = processor(text=texts, images=list(images), return_tensors="pt", padding=True, truncation=True)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        said = model(**inputs.to(device))
    seen, told = said.image_embeds, said.text_embeds
    fits = cosine_similarity(seen, told[:-2])
    looks = 100 * cosine_similarity(seen[:, None], told[None, -2:], dim=2)  # [B, 2]
    return {
        "clip_score": float(100 * fits.clamp(min=0).mean()),
        "clip_iqa": float(looks.softmax(dim=1)[:, 0].mean()),
    }
