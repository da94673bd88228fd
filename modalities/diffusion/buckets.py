"""Sizes that pictures are trained at: a few aspect ratios of about the same area, so that a batch has one size.

No picture is dropped for its size: the one of a rare size is in a smaller batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

Size = tuple[int, int]
"""(width, height), in pixels."""


def sizes(resolution: int, step: int, max_ratio: float) -> tuple[Size, ...]:
    """Sizes whose sides are multiples of `step` and whose area is the largest up to that of the square, for each width
    with an aspect ratio up to `max_ratio` either way.

    Args:
        resolution: side of the square, in pixels.
        step: granularity of both sides, in pixels; at most `resolution`.
        max_ratio: longer side over shorter side.
    """
    found = {(resolution // step * step,) * 2}
    for width in range(step, int(resolution * math.sqrt(max_ratio)) + step, step):
        height = resolution * resolution // width // step * step
        if height and max(width / height, height / width) <= max_ratio:
            found |= {(width, height), (height, width)}
    return tuple(sorted(found))


def nearest(size: Size, known: tuple[Size, ...]) -> Size:
    """The known size whose aspect ratio is nearest, on a logarithmic scale; of equals the larger one."""
    ratio = math.log(size[0] / size[1])
    return min(known, key=lambda item: (round(abs(math.log(item[0] / item[1]) - ratio), 9), -item[0] * item[1]))


def own(size: Size, bucket: Size, step: int) -> Size:
    """`bucket`, or for a picture that would have to be enlarged the largest size within it; never under one step."""
    if size[0] >= bucket[0] and size[1] >= bucket[1]:
        return bucket
    scale = min(1.0, max(bucket[0] / size[0], bucket[1] / size[1]))
    inside = (min(int(side * scale), most) for side, most in zip(size, bucket, strict=True))
    width, height = (max(step, side // step * step) for side in inside)
    return width, height


@dataclass(frozen=True)
class Crop:
    """How a picture becomes one of its size: resized, cut, perhaps mirrored.

    Args:
        resized: size that covers `size` with the picture's own aspect ratio.
        left, top: where the part that is taken begins in the resized picture, in pixels.
        size: of that part.
        flip: mirrored left to right.
    """

    resized: Size
    left: int
    top: int
    size: Size
    flip: bool = False

    @property
    def key(self) -> str:
        """All that decides the pixels, as a text for cache keys."""
        return f"{self.resized} {self.left} {self.top} {self.size} {self.flip}"

    def conditions(self, original: Size) -> tuple[int, int, int, int, int, int]:
        """What SDXL is told: original height and width, top and left of the crop, height and width of the target. In a
        mirrored picture the part begins at the other side."""
        left = self.resized[0] - self.size[0] - self.left if self.flip else self.left
        return original[1], original[0], self.top, left, self.size[1], self.size[0]


def crop(size: Size, bucket: Size, generator: np.random.Generator | None) -> Crop:
    """The crop of a picture to its size.

    Args:
        size: of the picture.
        bucket: size it is trained at.
        generator: draws the place; None: the middle.
    """
    scale = max(bucket[0] / size[0], bucket[1] / size[1])
    resized = (max(bucket[0], round(size[0] * scale)), max(bucket[1], round(size[1] * scale)))
    spare = (resized[0] - bucket[0], resized[1] - bucket[1])
    if generator is None:
        return Crop(resized, spare[0] // 2, spare[1] // 2, bucket)
    left, top = (int(generator.integers(room + 1)) for room in spare)
    return Crop(resized, left, top, bucket)


def cropped(image: Image, how: Crop) -> np.ndarray:
    """The pixels of a crop: uint8 [3, H, W] of an RGB picture, [1, H, W] of a grey one."""
    from PIL import Image, ImageOps

    if image.size != how.resized:
        image = image.resize(how.resized, Image.Resampling.LANCZOS)
    image = image.crop((how.left, how.top, how.left + how.size[0], how.top + how.size[1]))
    values = np.asarray(ImageOps.mirror(image) if how.flip else image)
    return np.array(values[None] if values.ndim == 2 else values.transpose(2, 0, 1), order="C")
