"""Class images of DreamBooth: those that are there, and the missing ones made by the base model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...common.console import progress
from ...common.errors import DataError
from .images import SUFFIXES
from .sections import PriorSection

log = logging.getLogger(__name__)


def files(section: PriorSection) -> list[Path]:
    """The class images of a recipe, the first `number` by name.

    Raises:
        DataError: there are too few.
    """
    found = present(section)
    if len(found) < section.number:
        raise DataError(
            "class images are missing",
            where="data.prior.path",
            given=f"{len(found)} pictures in {section.path}",
            expected=f"{section.number}",
            do="train with this recipe, which makes them, or put them there",
        )
    return found[: section.number]


def present(section: PriorSection) -> list[Path]:
    """All pictures of the folder, by name."""
    folder = Path(section.path)
    return sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES) if folder.is_dir() else []


def fill(section: PriorSection, pipe: Any, family: Any, size: int) -> None:
    """Make the class images that are missing: number n from the seed n, so that a run that was stopped here goes on
    with the same ones. They are written as PNG, whole or not at all."""
    from .sampling import sampled

    folder = Path(section.path)
    folder.mkdir(parents=True, exist_ok=True)
    missing = section.number - len(present(section))
    free: Sequence[int] = [n for n in range(section.number) if not (folder / f"class-{n:05d}.png").exists()]
    log.info("making %d class images in %s", missing, folder)
    with progress("making class images", "pictures") as show:
        for done, number in enumerate(free[:missing], 1):
            (image,) = sampled(
                pipe, family, [section.caption], [number], steps=section.steps, guidance=section.guidance,
                width=size, height=size,
            )  # fmt: skip
            temporary = folder / f".class-{number:05d}.new"
            image.save(temporary, format="PNG")
            temporary.replace(folder / f"class-{number:05d}.png")
            show(done, missing)
