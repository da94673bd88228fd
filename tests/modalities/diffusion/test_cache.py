"""Latents and text embeddings on disk: keyed by content, in half precision, within a bound, and the same whatever the
cache had before."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from luthier.common.data.collect import collect
from luthier.common.errors import ModelError
from luthier.modalities.diffusion.cache import TensorCache, key, rounded


def stored(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def name(number: int) -> str:
    return f"{number:02x}" * 32


def test_what_is_put_is_got_in_half_precision(tmp_path: Path) -> None:
    cache, value = TensorCache(tmp_path, 10**6), torch.randn(4, 8)
    assert cache.get(name(1)) is None
    cache.put(name(1), {"a": value, "b": value[:1]})
    got = TensorCache(tmp_path, 10**6).get(name(1))
    assert got is not None
    assert torch.equal(got["a"], rounded(value))
    assert torch.equal(got["a"], value.half().float())
    assert got["b"].shape == (1, 8)


def test_values_beyond_half_precision_are_told() -> None:
    with pytest.raises(ModelError, match=r"up to 1e\+05"):
        rounded(torch.tensor([1.0, -1e5]))


def test_the_space_stays_within_the_bound_and_the_oldest_goes(tmp_path: Path) -> None:
    cache = TensorCache(tmp_path, 20_000)
    for number in range(30):
        cache.put(name(number), {"x": torch.zeros(1000)})
        os.utime(cache._path(name(number)), ns=(number, number))
        assert stored(tmp_path) <= 20_000
    assert cache.get(name(29)) is not None
    assert cache.get(name(0)) is None
    cache.put(name(99), {"x": torch.zeros(20_000)})
    assert cache.get(name(99)) is None, "larger than everything"


def test_a_broken_file_is_computed_again_and_a_read_only_disk_is_no_end(tmp_path: Path, caplog, monkeypatch) -> None:
    cache = TensorCache(tmp_path, 10**6)
    cache.put(name(1), {"x": torch.ones(3)})
    cache._path(name(1)).write_bytes(b"broken")
    assert cache.get(name(1)) is None
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("No space left on device")))
    cache.put(name(2), {"x": torch.ones(3)})
    cache.put(name(3), {"x": torch.ones(3)})
    assert sum("can't be stored" in record.message for record in caplog.records) == 1
    assert not list(tmp_path.rglob("*.tmp"))


def test_keys_differ_by_every_part() -> None:
    assert len({key("a", 1), key("a", 2), key("b", 1), key("a1"), key("a", "1")}) == 5


# ---------------------------------------------------------------------------------------------- in a training


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many pictures and captions are encoded."""
    from luthier.modalities.diffusion.text_to_image import frozen as module

    counts = {"pictures": 0, "captions": 0}
    plain = module.moments

    def moments(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        counts["pictures"] += len(pixels)
        return plain(vae, pixels)

    monkeypatch.setattr(module, "moments", moments)
    return counts


def encoders(task: Any, counts: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = type(task.family).encode

    def encode(self: Any, pipe: Any, texts: Any, pieces: int = 1) -> Any:
        counts["captions"] += len(texts)
        return plain(self, pipe, texts, pieces)

    monkeypatch.setattr(type(task.family), "encode", encode)


def loss(task: Any, data: Any) -> float:
    torch.manual_seed(3)
    with torch.no_grad():
        return float(task.loss(data).sum)


@pytest.mark.parametrize("kind", ["sd", "sdxl", "sd3", "flux"])
def test_a_warm_cache_encodes_nothing_and_gives_the_same_loss(
    kind: str, make_task, batch_of, counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    task = make_task(kind, data={"cache": {"folder": str(tmp_path)}})
    encoders(task, counted, monkeypatch)
    cold = loss(task, batch_of(task))
    assert counted == {"pictures": 4, "captions": 4}
    warm = batch_of(task)
    assert warm["pixels"] is None
    assert warm["told"] == [0, 1, 2, 3]
    assert loss(task, warm) == cold
    assert counted == {"pictures": 4, "captions": 4}
    # A batch of which the cache has some only.
    assert loss(task, batch_of(task, 6)) == loss(task, batch_of(task, 6))
    assert counted == {"pictures": 6, "captions": 6}
    torch.manual_seed(0)
    bare = make_task(kind)
    assert loss(bare, batch_of(bare)) == pytest.approx(cold, rel=1e-3), "half precision"


def test_the_first_batch_decides_and_workers_that_looked_too_early_change_nothing(
    make_task, batch_of, counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_task("sd", data={"cache": {"folder": str(tmp_path)}})
    encoders(task, counted, monkeypatch)
    early = batch_of(task, 8)
    first = loss(task, batch_of(task, 4))
    with torch.no_grad():
        all_of_them = task.frozen.moments(early)
    assert counted == {"pictures": 8, "captions": 4}, "only the other four"
    assert torch.equal(all_of_them[:4], batch_of(task, 4)["moments"])
    assert loss(task, batch_of(task, 4)) == first


@pytest.mark.parametrize(("pixels", "calls"), [(2**18, [8]), (16 * 16 * 3, [3, 3, 2]), (1, [1] * 8)])
def test_large_pictures_are_encoded_one_by_one(
    pixels: int, calls: list[int], make_task, batch_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from luthier.modalities.diffusion.text_to_image import frozen as module

    seen: list[int] = []
    plain = module.moments
    monkeypatch.setattr(module, "TOGETHER", pixels)
    monkeypatch.setattr(module, "moments", lambda vae, part: seen.append(len(part)) or plain(vae, part))
    task = make_task("sd", data={"cache": {"folder": str(tmp_path)}})
    data = batch_of(task, 8)
    found = task.frozen.moments(data)
    assert seen == calls
    assert torch.allclose(found, plain(task.pipe.vae, data["pixels"]), rtol=2**-10, atol=1e-6), "in half precision"


@pytest.fixture
def pair(tmp_path: Path, paint) -> Path:
    place = tmp_path / "pictures"
    place.mkdir()
    for number, caption in enumerate(("a dog", "a cat")):
        paint(number).save(place / f"{number}.png")
        (place / f"{number}.txt").write_text(caption)
    return place


def keys(task: Any) -> tuple[list[str], list[str]]:
    processing = task.processing
    examples = collect(processing.recipe.data.train, processing, processing.recipe.data).examples
    encoded = [processing.encode(example, None) for example in examples]
    return [item.image_key for item in encoded], [item.text_key for item in encoded]


def test_edited_pictures_captions_and_settings_are_seen(make_task, paint, pair: Path, tmp_path: Path) -> None:
    def made(name: str = "sd", **more: Any) -> tuple[list[str], list[str]]:
        data = {"train": str(pair), "cache": {"folder": str(tmp_path / "cache")}, **more}
        return keys(make_task(name, data=data))

    images, texts = made()
    (pair / "0.txt").write_text("a dog that was edited")
    assert made()[0] == images
    assert [a == b for a, b in zip(made()[1], texts, strict=True)] == [False, True]
    (pair / "0.txt").write_text("a dog")
    assert made() == (images, texts)
    paint(5).save(pair / "1.png")
    assert [a == b for a, b in zip(made()[0], images, strict=True)] == [True, False]
    paint(1).save(pair / "1.png")
    assert made() == (images, texts), "by content and not by time"
    assert not set(made(image={"resolution": 32, "step": 4, "min_side": 4})[0]) & set(images)
    assert not set(made(captions={"prefix": "sks "})[1]) & set(texts)
    assert not set(made(captions={"chunks": 2})[1]) & set(texts)
    others = made("v")  # the same weights in another folder
    assert others == (images, texts)
    assert not set(made("sdxl")[1]) & set(texts)


def test_a_cache_of_another_vae_is_not_used(make_task, pipeline_of, pair: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    changed = tmp_path / "changed"
    shutil.copytree(pipeline_of("sd"), changed)
    file = changed / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["encoder.conv_in.weight"] = tensors["encoder.conv_in.weight"] + 0.1
    save_file(tensors, file)
    data = {"train": str(pair), "cache": {"folder": str(tmp_path / "cache")}}
    first, second = keys(make_task("sd", data=data)), keys(make_task(str(changed), data=data))
    assert not set(first[0]) & set(second[0])
    assert first[1] == second[1]
    config = changed / "vae" / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, "scaling_factor": 0.5}))
    assert not set(keys(make_task(str(changed), data=data))[0]) & set(second[0])


def test_flips_are_kept_beside_the_pictures(make_task, batch_of, counted, pair: Path, tmp_path: Path) -> None:
    image = {"resolution": 16, "step": 4, "min_side": 4, "flip": 0.5}
    task = make_task("sd", data={"train": str(pair), "cache": {"folder": str(tmp_path / "cache")}, "image": image})
    for seed in range(8):
        task.frozen.moments(batch_of(task, 2, seed))
    assert counted["pictures"] == 4, "each picture and its mirror image once"


def test_text_that_is_trained_is_not_kept(make_task, batch_of, pair: Path, tmp_path: Path) -> None:
    data = {"train": str(pair), "cache": {"folder": str(tmp_path / "cache")}}
    task = make_task(
        "sd", data=data, model={"path": make_task("sd").recipe.model.path, "text_encoder_lora": {"rank": 2}}
    )
    loss(task, batch_of(task, 2))
    again = batch_of(task, 2)
    assert again["pixels"] is None
    assert again["told"] == []
    assert len(list((tmp_path / "cache").rglob("*.safetensors"))) == 2
