"""Sizes, crops and what SDXL is told about them (fault 9 is in test_data.py too: no picture is dropped)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from luthier.modalities.diffusion.buckets import Crop, crop, cropped, nearest, own, sizes

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def test_sizes_of_sdxl() -> None:
    found = sizes(1024, 64, 2.0)
    assert (1024, 1024) in found
    for expected in ((896, 1152), (1152, 896), (832, 1216), (1216, 832), (768, 1344), (1344, 768)):
        assert expected in found, "one of SDXL's own"
    assert all((height, width) in found for width, height in found)


@quick
@given(resolution=st.integers(64, 1100), step=st.sampled_from([8, 16, 32, 64]), ratio=st.floats(1, 4))
def test_every_size_is_a_multiple_within_area_and_ratio(resolution: int, step: int, ratio: float) -> None:
    for width, height in sizes(resolution, step, ratio):
        assert width % step == height % step == 0
        assert 0 < width * height <= resolution**2
        assert max(width / height, height / width) <= max(ratio, 1.0)


@quick
@given(width=st.integers(1, 5000), height=st.integers(1, 5000))
def test_the_nearest_size_is_nearest(width: int, height: int) -> None:
    known = sizes(512, 64, 2.0)
    chosen = nearest((width, height), known)

    def distance(size: tuple[int, int]) -> float:
        return abs(math.log(size[0] / size[1]) - math.log(width / height))

    assert distance(chosen) <= min(map(distance, known)) + 1e-9


def test_a_small_picture_has_its_own_size_where_nothing_is_enlarged() -> None:
    assert own((600, 700), (512, 512), 64) == (512, 512)
    assert own((300, 300), (512, 512), 64) == (256, 256)
    assert own((2000, 100), (704, 352), 32) == (704, 96)
    assert own((10, 10), (512, 512), 64) == (64, 64), "never under one step"


@quick
@given(width=st.integers(8, 600), height=st.integers(8, 600), seed=st.integers(0, 5))
def test_a_crop_lies_within_the_resized_picture(width: int, height: int, seed: int) -> None:
    bucket = nearest((width, height), sizes(128, 16, 2.0))
    for how in (crop((width, height), bucket, None), crop((width, height), bucket, np.random.default_rng(seed))):
        assert how.size == bucket
        for at, side, whole in zip((how.left, how.top), bucket, how.resized, strict=True):
            assert 0 <= at <= whole - side
        assert how.resized[0] == bucket[0] or how.resized[1] == bucket[1], "it covers its size and no more"
        # Rounded to whole pixels, the aspect ratio stays.
        assert how.resized[0] / width == pytest.approx(how.resized[1] / height, abs=1 / min(width, height))


def test_the_middle_is_taken_and_told() -> None:
    how = crop((200, 100), (64, 64), None)
    assert how == Crop((128, 64), 32, 0, (64, 64))
    assert how.conditions((200, 100)) == (100, 200, 0, 32, 64, 64), "height, width, top, left, height, width"
    left = Crop((128, 64), 10, 0, (64, 64), flip=True)
    assert left.conditions((200, 100))[3] == 128 - 64 - 10, "mirrored, it begins as far from the other side"


def test_random_crops_differ_and_reach_both_ends() -> None:
    lefts = {crop((80, 40), (40, 40), np.random.default_rng(seed)).left for seed in range(400)}
    assert {0, 40} <= lefts <= set(range(41))


def test_pixels_are_those_of_the_picture() -> None:
    values = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    image = Image.fromarray(values)
    found = cropped(image, Crop((6, 4), 1, 0, (4, 4)))
    assert found.shape == (3, 4, 4)
    assert np.array_equal(found, values[:, 1:5].transpose(2, 0, 1)), "nothing is resized where nothing has to be"
    mirrored = cropped(image, Crop((6, 4), 1, 0, (4, 4), flip=True))
    assert np.array_equal(mirrored, found[:, :, ::-1])
    assert cropped(image.convert("L"), Crop((6, 4), 1, 0, (4, 4))).shape == (1, 4, 4)


def test_the_key_says_all_that_decides_the_pixels() -> None:
    base = Crop((8, 8), 1, 2, (4, 4))
    others = [Crop((9, 8), 1, 2, (4, 4)), Crop((8, 8), 0, 2, (4, 4)), Crop((8, 8), 1, 0, (4, 4)),
              Crop((8, 8), 1, 2, (4, 8)), Crop((8, 8), 1, 2, (4, 4), True)]  # fmt: skip
    assert len({how.key for how in (base, *others)}) == 6
