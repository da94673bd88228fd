"""Sounds and pictures inside a page."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

TYPES = {
    ".wav": "audio/wav", ".flac": "audio/flac", ".mp3": "audio/mpeg", ".ogg": "audio/ogg", ".opus": "audio/ogg",
    ".m4a": "audio/mp4", ".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp",
}  # fmt: skip
SMALL = 400_000
"""Bytes up to which a sound is put into a page as it is; a larger one is cut to what is heard and packed as FLAC."""


class Media:
    """Gives what a page holds, as `data:` addresses, up to a size of all together.

    Args:
        most: bytes; what comes after is left out, and counted in `left_out`.
    """

    def __init__(self, most: int = 24_000_000):
        self._left = most
        self.left_out = 0

    def bytes(self, data: bytes, kind: str) -> str | None:
        """The address of an encoded file; None if there is no room any more."""
        if len(data) > self._left:
            self.left_out += 1
            return None
        self._left -= len(data)
        return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"

    def file(self, path: Path) -> str | None:
        """The address of a picture or a sound as it is; None if it is not there or of no known kind."""
        kind = TYPES.get(path.suffix.lower())
        if kind is None or not path.is_file():
            return None
        return self.bytes(path.read_bytes(), kind)

    def sound(self, path: Path, start: float = 0.0, end: float | None = None) -> str | None:
        """The address of a piece of a recording; None if it can't be read."""
        if not path.is_file():
            return None
        if not start and end is None and path.stat().st_size <= SMALL and path.suffix.lower() in TYPES:
            return self.file(path)
        try:
            return self.bytes(_piece(path, start, end), "audio/flac")
        except (ImportError, OSError, RuntimeError, ValueError):  # no library for it, or it reads no such file
            return None


def _piece(path: Path, start: float, end: float | None) -> bytes:
    import soundfile  # type: ignore[import-untyped,unused-ignore]

    rate = soundfile.info(path).samplerate
    stop = None if end is None else round(end * rate)
    samples, rate = soundfile.read(path, start=round(start * rate), stop=stop, dtype="float32", always_2d=True)
    return encoded(samples.mean(axis=1), rate)


def encoded(samples: Any, rate: int) -> bytes:
    """Samples [T] in -1 to 1 as a FLAC file."""
    import soundfile  # type: ignore[import-untyped,unused-ignore]

    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="FLAC", subtype="PCM_16")
    return file.getvalue()


def grey(picture: Any) -> bytes:
    """Numbers [H, W] as a PNG picture, the smallest black and the largest white; the first row is at the bottom."""
    import struct
    import zlib

    import numpy as np

    values = np.asarray(picture, dtype=np.float64)[::-1]
    low, high = (float(np.nanmin(values)), float(np.nanmax(values))) if values.size else (0.0, 1.0)
    shades = np.nan_to_num((values - low) / max(high - low, 1e-12) * 255).clip(0, 255).astype(np.uint8)
    rows = b"".join(b"\0" + row.tobytes() for row in shades)

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", shades.shape[1], shades.shape[0], 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
