"""Pictures from bytes: decoded in full, upright, in 8-bit RGB, whatever the file's mode."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...common.errors import BadExample

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif", ".jxl", ".ppm", ".pgm")
"""Names of picture files end so, in any case of letters."""

Stored = str | Callable[[], bytes]
"""A file's path, or what gives the encoded bytes."""

Colour = tuple[int, int, int]


def stored_bytes(image: Stored, where: str) -> bytes:
    """The encoded bytes of a picture.

    Raises:
        BadExample: `missing_file` or `unreadable_file`.
    """
    if not isinstance(image, str):
        return image()
    try:
        return Path(image).read_bytes()
    except FileNotFoundError as error:
        raise BadExample("missing_file", "no such picture", where=where, given=image) from error
    except OSError as error:
        raise BadExample("unreadable_file", f"can't be read: {error.strerror}", where=where, given=image) from error


def digest(data: bytes) -> str:
    """SHA-256 (hex) of bytes."""
    return hashlib.sha256(data).hexdigest()


def decoded(data: bytes, where: str, background: Colour = (255, 255, 255)) -> Image:
    """A picture in 8-bit RGB: every pixel decoded, turned as its EXIF says, laid on `background` where transparent.

    Of several frames it is the first.

    Raises:
        BadExample: `corrupt_image` (also a file that ends too early), `too_large` (Pillow's bound against
            decompression bombs), `non_finite_image`.
    """
    from PIL import Image, ImageFile, ImageOps

    ImageFile.LOAD_TRUNCATED_IMAGES = False  # another library may have set it; a cut file would end in grey rows
    try:
        with Image.open(BytesIO(data)) as file:
            file.load()
            return rgb(ImageOps.exif_transpose(file), background)
    except Image.DecompressionBombError as error:
        raise BadExample("too_large", str(error), where=where) from error
    except BadExample as error:
        raise BadExample(error.reason, "the picture has values that are no numbers", where=where) from error
    except Exception as error:  # which ones Pillow raises depends on the format
        raise BadExample("corrupt_image", f"can't be decoded: {error}", where=where) from error


def rgb(image: Image, background: Colour = (255, 255, 255)) -> Image:
    """A Pillow image of any mode in RGB, 8 bits a channel.

    16-bit greys are divided by 257; Pillow's own conversion would cut them to 255, nearly all white. Floats are taken
    as 0 to 1 if none is above 1, else as 0 to 255.
    """
    from PIL import Image

    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(_eight_bits(np.asarray(image), image.mode == "F")).convert("RGB")
    if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, (*background, 255)), layer).convert("RGB")
    if image.mode == "LAB":
        from PIL import ImageCms

        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        converted = ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB")
        assert converted is not None  # only when it is made in place
        return converted
    return image.convert("RGB")


def _eight_bits(values: np.ndarray, floats: bool) -> np.ndarray:
    """Grey values [H, W] of 16 bits, or floats, as 8 bits."""
    values = values.astype(np.float64)
    if not np.isfinite(values).all():
        raise BadExample("non_finite_image", "the picture has values that are no numbers")
    largest = values.max(initial=0.0)
    values = values * (255 if largest <= 1 else 1) if floats else values / 257
    return np.asarray(np.clip(np.round(values), 0, 255), dtype=np.uint8)


_SHADES = " ░▒▓█"


def draw(grey: np.ndarray, columns: int = 48) -> str:
    """Grey values [H, W] as lines of text; darker letters are brighter. A letter is twice as high as wide."""
    height, width = grey.shape
    rows = max(1, round(columns * height / width / 2))
    down = np.linspace(0, height - 1, rows).round().astype(int)
    across = np.linspace(0, width - 1, min(columns, width)).round().astype(int)
    small = grey[np.ix_(down, across)].astype(float)
    low, high = small.min(), small.max()
    levels = ((small - low) / max(high - low, 1e-9) * (len(_SHADES) - 1)).round().astype(int)
    return "\n".join("".join(_SHADES[level] for level in line) for line in levels)
