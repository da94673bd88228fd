"""The feature cache: keyed by content, bounded, whole files only."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from luthier.modalities.asr.cache import FeatureCache, key
from luthier.modalities.asr.utterance import Utterance

# 80 bins, 10 frames, 2 bytes each; numpy's header is 128 bytes.
SIZE = 80 * 10 * 2 + 128


def mel(value: float = 0.5) -> torch.Tensor:
    return torch.full((80, 10), value)


def name(number: int) -> str:
    return f"{number:02x}" * 32


def stored(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_what_is_put_is_got_in_half_precision(tmp_path):
    cache, features = FeatureCache(tmp_path, 10**6), torch.randn(80, 10)
    assert cache.get(name(1)) is None
    cache.put(name(1), features)
    got = FeatureCache(tmp_path, 10**6).get(name(1))
    assert got is not None
    assert got.dtype == torch.float32
    # 11 bits of mantissa: half a unit in the last place is 2^-11 of the value.
    torch.testing.assert_close(got, features, rtol=2**-11, atol=1e-7)
    assert stored(tmp_path) == SIZE


def test_key_follows_content_piece_channel_and_settings(tmp_path):
    first, second = tmp_path / "a.wav", tmp_path / "b.wav"
    first.write_bytes(b"sound")
    second.write_bytes(b"sound")
    one = Utterance(audio=str(first), text="x", where="a:1")
    same = [one, replace(one, audio=str(second), text="y", where="b:2"), replace(one, audio=lambda: b"sound")]
    assert len({key(utterance, "mel") for utterance in same}) == 1
    others = [replace(one, start=1.0), replace(one, end=2.0), replace(one, channel=0), replace(one, channel=1)]
    assert len({key(utterance, "mel") for utterance in [one, *others]} | {key(one, "other")}) == 6


def test_key_changes_with_the_file(tmp_path):
    file = tmp_path / "a.wav"
    file.write_bytes(b"sound")
    utterance = Utterance(audio=str(file), text="", where="a:1")
    before = key(utterance, "")
    file.write_bytes(b"other")
    os.utime(file, ns=(1, 1))
    assert key(utterance, "") != before


def test_the_oldest_used_go_and_the_bound_holds(tmp_path):
    cache = FeatureCache(tmp_path, 5 * SIZE)
    for number in range(5):
        cache.put(name(number), mel())
        os.utime(cache._path(name(number)), ns=(number, number))
    assert cache.get(name(0)) is not None  # used just now
    cache.put(name(5), mel())
    held = [number for number in range(6) if cache.get(name(number)) is not None]
    assert held == [0, 2, 3, 4, 5]
    for number in range(6, 40):
        cache.put(name(number), mel())
        assert stored(tmp_path) <= 5 * SIZE
        assert cache.get(name(number)) is not None


def test_a_folder_from_before_counts(tmp_path):
    for number in range(6):
        FeatureCache(tmp_path, 10**6).put(name(number), mel())
    FeatureCache(tmp_path, 3 * SIZE).put(name(7), mel())
    assert stored(tmp_path) <= 3 * SIZE


def test_what_never_fits_is_not_stored(tmp_path):
    FeatureCache(tmp_path, 100).put(name(0), mel())
    assert stored(tmp_path) == 0


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"no array at all", bytes(SIZE)])
def test_a_broken_file_is_a_miss(tmp_path, content):
    cache = FeatureCache(tmp_path, 10**6)
    cache.put(name(0), mel())
    cache._path(name(0)).write_bytes(content)
    assert cache.get(name(0)) is None
    cache.put(name(0), mel())
    assert cache.get(name(0)) is not None


def test_truncated_and_pickled_files_are_misses(tmp_path):
    cache = FeatureCache(tmp_path, 10**6)
    cache.put(name(0), mel())
    path = cache._path(name(0))
    path.write_bytes(path.read_bytes()[:-1])
    assert cache.get(name(0)) is None
    with path.open("wb") as file:
        np.save(file, np.array([object()]), allow_pickle=True)
    assert cache.get(name(0)) is None


def test_a_failed_write_leaves_nothing_and_goes_on(tmp_path, monkeypatch, caplog):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    cache = FeatureCache(tmp_path, 10**6)
    cache.put(name(0), mel())
    monkeypatch.setattr(os, "replace", full)
    with caplog.at_level(logging.WARNING):
        cache.put(name(1), mel())
        cache.put(name(2), mel())
    assert len(caplog.records) == 1
    assert stored(tmp_path) == SIZE
    assert cache.get(name(0)) is not None


def test_an_interrupted_write_is_not_a_file(tmp_path, monkeypatch):
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    cache = FeatureCache(tmp_path, 10**6)
    cache.put(name(0), mel(0.25))
    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        cache.put(name(0), mel(0.75))
    got = cache.get(name(0))
    assert got is not None
    assert (got == 0.25).all()


def test_left_halves_are_cleared(tmp_path):
    half = tmp_path / "00" / "x.tmp"
    half.parent.mkdir()
    half.write_bytes(bytes(1000))
    os.utime(half, (1, 1))
    FeatureCache(tmp_path, 10**6).put(name(0), mel())
    assert not half.exists()


def test_a_cleared_folder_is_made_again(tmp_path):
    cache = FeatureCache(tmp_path / "cache", 10**6)
    cache.put(name(0), mel())
    shutil.rmtree(tmp_path / "cache")
    assert cache.get(name(0)) is None
    cache.put(name(0), mel())
    assert cache.get(name(0)) is not None


def _write(folder: str, worker: int) -> None:
    cache = FeatureCache(folder, 8 * SIZE)
    for step in range(60):
        number = (step * (worker + 1)) % 20
        got = cache.get(name(number))
        assert got is None or bool((got == number).all())
        cache.put(name(number), mel(number))


def test_processes_share_a_folder(tmp_path):
    """No process fails or sees a file half-written, and the bound holds up to what each was about to add."""
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_write, args=(str(tmp_path), worker)) for worker in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert stored(tmp_path) <= (8 + len(workers)) * SIZE
    assert not list(tmp_path.rglob("*.tmp"))
