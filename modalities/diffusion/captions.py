"""Captions as they are trained on: prefix, new order of tags, dropout."""

from __future__ import annotations

import numpy as np

from .sections import CaptionSection

SEPARATOR = ", "


def varied(caption: str, section: CaptionSection, generator: np.random.Generator | None) -> str:
    """A caption with its prefix; in training also shuffled or dropped.

    Args:
        caption: as the data has it.
        section: what to do.
        generator: draws; None: no variation (evaluation).
    """
    if generator is not None:
        if section.dropout and generator.random() < section.dropout:
            return ""
        if section.shuffle:
            caption = shuffled(caption, section.keep, generator)
    return section.prefix + caption


def shuffled(caption: str, keep: int, generator: np.random.Generator) -> str:
    """The parts between commas in a new order, but for the first `keep`."""
    parts = [part.strip() for part in caption.split(",") if part.strip()]
    rest = parts[keep:]
    return SEPARATOR.join([*parts[:keep], *(rest[i] for i in generator.permutation(len(rest)))])
