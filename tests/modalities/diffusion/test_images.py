"""Pictures of every mode, and broken ones (faults 6 and 7)."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from luthier.common.errors import BadExample
from luthier.modalities.diffusion.images import SUFFIXES, decoded, draw, rgb, stored_bytes


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    written = BytesIO()
    image.save(written, kind, **options)
    return written.getvalue()


def array(image: Image.Image) -> np.ndarray:
    return np.asarray(image)


COLOURS = np.array([[[200, 30, 30], [30, 200, 30]], [[30, 30, 200], [250, 250, 250]]], dtype=np.uint8)


@pytest.mark.parametrize(
    ("orientation", "expected"),
    [
        (1, COLOURS),
        (2, COLOURS[:, ::-1]),  # mirrored
        (3, COLOURS[::-1, ::-1]),  # upside down
        (6, np.rot90(COLOURS, -1)),  # to be turned by 90 degrees clockwise
        (8, np.rot90(COLOURS, 1)),
    ],
)
def test_fault_6_pictures_are_upright_as_their_exif_says(orientation: int, expected: np.ndarray) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = decoded(encoded(Image.fromarray(COLOURS), exif=exif), "a:1")
    assert np.array_equal(array(found), expected)


def test_fault_6_a_transparent_picture_is_laid_on_the_background() -> None:
    values = np.zeros((1, 3, 4), dtype=np.uint8)
    values[0, :, 3] = (0, 255, 128)  # black: absent, present, about half
    found = array(decoded(encoded(Image.fromarray(values, "RGBA")), "a:1", (255, 0, 100)))
    # alpha 128 of 255 black over the background: (1 - 128 / 255) of it
    assert found[0].tolist() == [[255, 0, 100], [0, 0, 0], [127, 0, 50]]


def test_fault_6_grey_with_alpha_and_palettes_with_a_transparent_colour() -> None:
    grey = Image.fromarray(np.array([[[10, 255], [10, 0]]], dtype=np.uint8), "LA")
    assert array(decoded(encoded(grey), "a:1"))[0].tolist() == [[10, 10, 10], [255, 255, 255]]
    palette = Image.new("P", (2, 1))
    palette.putpalette([9, 8, 7, 200, 100, 50])
    palette.putdata([0, 1])
    found = array(decoded(encoded(palette, transparency=1), "a:1", (0, 0, 0)))
    assert found[0].tolist() == [[9, 8, 7], [0, 0, 0]]
    assert array(decoded(encoded(palette), "a:1"))[0].tolist() == [[9, 8, 7], [200, 100, 50]]


def test_fault_6_cmyk_becomes_rgb() -> None:
    ink = Image.fromarray(np.array([[[0, 255, 255, 0], [0, 0, 0, 255], [0, 0, 0, 0]]], dtype=np.uint8), "CMYK")
    assert array(decoded(encoded(ink, "TIFF"), "a:1"))[0].tolist() == [[255, 0, 0], [0, 0, 0], [255, 255, 255]]
    jpeg = decoded(encoded(ink.resize((16, 16)), "JPEG", quality=95), "a:1")
    assert jpeg.mode == "RGB"


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_fault_6_sixteen_bits_are_scaled_and_not_cut(kind: str) -> None:
    grey = Image.fromarray(np.array([[0, 257, 32896, 65535]], dtype=np.uint16))
    assert grey.mode.startswith("I")
    found = array(decoded(encoded(grey, kind), "a:1"))
    assert found[0, :, 0].tolist() == [0, 1, 128, 255], "value / 257"
    assert (found[..., :1] == found).all()


def test_fault_6_other_modes() -> None:
    assert array(rgb(Image.fromarray(np.array([[0, 65535]], dtype=np.int32)))).tolist() == [[[0] * 3, [255] * 3]]
    assert array(rgb(Image.fromarray(np.array([[0.0, 0.5, 1.0]], dtype=np.float32))))[0, :, 0].tolist() == [0, 128, 255]
    assert array(rgb(Image.fromarray(np.array([[0.0, 100.0]], dtype=np.float32))))[0, :, 0].tolist() == [0, 100]
    assert array(rgb(Image.new("1", (1, 1), 1)))[0, 0].tolist() == [255, 255, 255]
    white = rgb(Image.new("LAB", (1, 1), (255, 128, 128)))
    assert white.mode == "RGB"
    assert array(white).min() > 245
    for mode in ("L", "YCbCr", "HSV", "RGB"):
        assert rgb(Image.new(mode, (2, 2))).mode == "RGB"


def test_values_that_are_no_numbers_are_refused() -> None:
    broken = Image.fromarray(np.array([[0.0, np.nan]], dtype=np.float32))
    with pytest.raises(BadExample) as caught:
        decoded(encoded(broken, "TIFF"), "pictures.jsonl:3")
    assert caught.value.reason == "non_finite_image"
    assert "pictures.jsonl:3" in str(caught.value)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_fault_7_a_cut_file_is_refused_whatever_another_library_has_set(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise), kind)
    assert decoded(data, "a:1").size == (64, 64)
    for part in (0.95, 0.5):
        monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
        with pytest.raises(BadExample) as caught:
            decoded(data[: int(len(data) * part)], "a:1")
        assert caught.value.reason == "corrupt_image"


@pytest.mark.parametrize("data", [b"", b"this is no picture", b"\x89PNG\r\n\x1a\n"])
def test_what_is_no_picture_is_refused(data: bytes) -> None:
    with pytest.raises(BadExample) as caught:
        decoded(data, "a:1")
    assert caught.value.reason == "corrupt_image"


def test_a_decompression_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(BadExample) as caught:
        decoded(encoded(Image.new("RGB", (8, 8))), "a:1")
    assert caught.value.reason == "too_large"


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(BadExample, match=r"gone\.png") as caught:
        stored_bytes(str(tmp_path / "gone.png"), "a:1")
    assert caught.value.reason == "missing_file"
    with pytest.raises(BadExample) as caught:
        stored_bytes(str(tmp_path), "a:1")
    assert caught.value.reason == "unreadable_file"
    assert stored_bytes(lambda: b"x", "a:1") == b"x"


def test_the_first_frame_of_several_is_taken() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    written = BytesIO()
    frames[0].save(written, "GIF", save_all=True, append_images=frames[1:])
    assert array(decoded(written.getvalue(), "a:1"))[0, 0].tolist() == [255, 0, 0]


def test_a_drawing_has_the_picture_s_proportions() -> None:
    grey = np.zeros((20, 40))
    grey[:, 20:] = 255
    lines = draw(grey, 8).split("\n")
    assert len(lines) == 2, "8 columns of a picture half as high, and letters twice as high as wide"
    assert lines[0] == "    ████"
    assert ".png" in SUFFIXES
