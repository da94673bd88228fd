"""Where pictures and captions come from, what is left out and counted, and what a batch holds."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from luthier.common.data.collect import collect
from luthier.common.data.processing import PlannedData
from luthier.common.errors import BadExample, DataError, RecipeError
from luthier.common.training import data as training_data
from luthier.modalities.diffusion.pictures import pictures
from luthier.modalities.diffusion.sections import ImageSection
from luthier.modalities.diffusion.text_to_image.processing import ImageProcessing


@pytest.fixture(scope="module")
def processing_of(make_recipe) -> Any:
    """`processing_of(place, name, **sections)`: the data path of a recipe on these pictures, and what it collects."""

    def of(place: Any, name: str = "sd", **more: Any) -> tuple[ImageProcessing, Any]:
        sections = {"data": {"train": str(place), "max_bad": 1.0, **more.pop("data", {})}, **more}
        processing = ImageProcessing.of(make_recipe(name, **sections))
        return processing, collect(processing.recipe.data.train, processing, processing.recipe.data)

    return of


def source(path: Path) -> Any:
    from luthier.common.recipe import Source

    return Source(path=str(path))


# ---------------------------------------------------------------------------------------------- sources


def test_caption_files_beside_pictures(tmp_path: Path, paint) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.png", "a.JPG", "deep/c.webp", "d.png"):
        paint(1).save(tmp_path / name)
    (tmp_path / "a.txt").write_text("a dog,\n  grey\n", encoding="utf-8")
    (tmp_path / "b.caption").write_text("a cat", encoding="utf-8")
    (tmp_path / "deep" / "c.txt").write_text("a house", encoding="utf-8")
    Image.new("L", (16, 16), 255).save(tmp_path / "b.mask.png")
    found = {picture.where: picture for picture in pictures(source(tmp_path))}
    assert {name: picture.caption for name, picture in found.items()} == {
        "a.JPG": "a dog, grey", "b.png": "a cat", "d.png": None, "deep/c.webp": "a house",
    }  # fmt: skip
    assert found["b.png"].mask == str(tmp_path / "b.mask.png")
    assert found["a.JPG"].mask is None


def test_metadata_names_pictures_and_further_fields_are_slices(folder: Path) -> None:
    found = list(pictures(source(folder)))
    assert len(found) == 8
    assert found[0].image == str(folder / "0.png")
    assert (found[0].caption, found[0].fields, found[0].where) == ("a red dot", {"kind": "a"}, "metadata.jsonl:1")


def test_a_data_set_with_an_image_column(tmp_path: Path, paint) -> None:
    rows = {"image": [paint(1), paint(2)], "caption": ["one", "two"], "score": [1, 2]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "set")
    found = list(pictures(source(tmp_path / "set")))
    assert [(picture.caption, picture.fields) for picture in found] == [("one", {"score": 1}), ("two", {"score": 2})]
    parquet = tmp_path / "rows.parquet"
    datasets.Dataset.from_dict(rows).to_parquet(parquet)
    for picture in (*found, *pictures(source(parquet))):
        assert callable(picture.image)
        assert Image.open(__import__("io").BytesIO(picture.image())).size == (16, 16)


def test_rows_without_picture_or_caption_are_named(tmp_path: Path, paint, processing_of) -> None:
    paint(1).save(tmp_path / "1.png")
    rows = [{"file_name": "1.png", "text": "a"}, {"text": "no picture"}, {"file_name": "1.png"},
            {"file_name": "1.png", "text": 7}]  # fmt: skip
    file = tmp_path / "metadata.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    _, found = processing_of(tmp_path)
    assert found.report.dropped == Counter(no_image=1, no_caption=2)
    assert "metadata.jsonl:2" in found.report.named["no_image"][0]
    _, found = processing_of(tmp_path, data={"captions": {"default": "a photo"}})
    assert found.report.dropped == Counter(no_image=1, no_caption=1)
    assert [example.caption for example in found.examples] == ["a", "a photo"]


def test_fault_7_broken_pictures_are_quarantined_and_counted(tmp_path: Path, paint, processing_of) -> None:
    for number in range(6):
        paint(number, 64, 64).save(tmp_path / f"{number}.jpg", quality=95)
        (tmp_path / f"{number}.txt").write_text("a picture")
    whole = (tmp_path / "1.jpg").read_bytes()
    (tmp_path / "1.jpg").write_bytes(whole[: len(whole) * 2 // 3])
    (tmp_path / "2.jpg").write_bytes(b"no picture")
    paint(3, 3, 3).save(tmp_path / "3.jpg")
    _, found = processing_of(tmp_path)
    assert found.report.dropped == Counter(corrupt_image=2, too_small=1)
    assert (found.report.rows, found.report.kept_rows) == (6, 3)
    assert any("1.jpg" in line for line in found.report.named["corrupt_image"])
    with pytest.raises(BadExample, match=r"1\.jpg"):
        processing_of(tmp_path, data={"on_bad": "raise"})
    with pytest.raises(DataError, match="too many rows"):
        processing_of(tmp_path, data={"max_bad": 0.2})


def test_a_mask_of_another_size_is_refused(tmp_path: Path, paint, processing_of) -> None:
    paint(1).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("x")
    Image.new("L", (8, 16)).save(tmp_path / "a.mask.png")
    with pytest.raises(DataError, match="wrong_mask"):
        processing_of(tmp_path)


# ---------------------------------------------------------------------------------------------- captions


def test_fault_10_what_is_cut_from_captions_is_counted(tmp_path: Path, paint, processing_of) -> None:
    for number, caption in enumerate(("short", "x" * 75, "x" * 76, "y" * 200)):  # a letter is a token here
        paint(number).save(tmp_path / f"{number}.png")
        (tmp_path / f"{number}.txt").write_text(caption)
    _, found = processing_of(tmp_path)
    assert found.report.noted["caption tokens cut"] == 1 + 125
    assert "126 caption tokens cut" in found.report.summary()
    _, found = processing_of(tmp_path, data={"captions": {"chunks": 3}})
    assert "caption tokens cut" not in found.report.noted
    _, found = processing_of(tmp_path, data={"captions": {"prefix": "z" * 75}})
    assert found.report.noted["caption tokens cut"] == 5 + 75 + 76 + 200


def test_fault_10_long_captions_are_read_in_pieces(make_task, batch_of) -> None:
    """Three pieces of 75 letters, each as the encoder reads it alone; what is missing are empty pieces."""
    task = make_task("sd", data={"captions": {"chunks": 3}})
    text = "abcdefghij" * 10  # a piece and a third
    found = task.family.encode(task.pipe, [text, "a"], 3)["embeds"]
    assert found.shape == (2, 3 * 77, 32)
    parts = [task.family.encode(task.pipe, [piece])["embeds"][0] for piece in ("", "a")]
    assert torch.allclose(found[1, :77], parts[1], atol=1e-6)
    assert torch.allclose(found[1, 77:154], parts[0], atol=1e-6)
    # The begin of a long caption: as if it were cut there. CLIP attends to what came before only.
    assert torch.allclose(found[0, :76], task.family.encode(task.pipe, [text])["embeds"][0, :76], atol=1e-6)
    ids = task.pipe.tokenizer(text, add_special_tokens=False).input_ids[75:]
    second = torch.tensor([[task.pipe.tokenizer.bos_token_id, *ids, task.pipe.tokenizer.eos_token_id]])
    alone = task.pipe.text_encoder(second)[0][0]
    assert torch.allclose(found[0, 77 : 77 + len(alone)], alone, atol=1e-6)
    assert torch.isfinite(task.loss(batch_of(task)).sum)


def test_sdxl_reads_pieces_with_both_encoders(make_task, batch_of) -> None:
    task = make_task("sdxl", data={"captions": {"chunks": 2}})
    found = task.family.encode(task.pipe, ["a " * 100], 2)
    one = task.family.encode(task.pipe, ["a " * 75])
    assert found["embeds"].shape == (1, 154, 64)
    assert torch.allclose(found["embeds"][:, :77], one["embeds"], atol=1e-6)
    assert torch.allclose(found["pooled"], one["pooled"], atol=1e-6), "the pooled text is that of the first piece"
    assert torch.isfinite(task.loss(batch_of(task)).sum)


def test_pieces_are_refused_where_the_model_has_none(make_task) -> None:
    with pytest.raises(RecipeError, match="one piece"):
        make_task("flux", data={"captions": {"chunks": 2}})


# ---------------------------------------------------------------------------------------------- sizes


@pytest.fixture(scope="module")
def mixed(tmp_path_factory, paint) -> Path:
    """13 wide, 3 high and 1 square picture."""
    place = tmp_path_factory.mktemp("mixed")
    shapes = [(48, 24)] * 13 + [(20, 40)] * 3 + [(64, 64)]
    for number, (width, height) in enumerate(shapes):
        paint(number, width, height).save(place / f"{number:02d}.png")
        (place / f"{number:02d}.txt").write_text(f"picture {number}")
    return place


def test_fault_9_no_picture_is_dropped_for_its_size(mixed: Path, processing_of) -> None:
    processing, found = processing_of(mixed, train={"steps": None, "epochs": 2})
    plan = training_data.plan(processing.recipe, found, processing, 1, 1)
    batches = list(plan.batches())
    for epoch in (0, 1):
        seen = [index for batch in batches if batch.epoch == epoch for index in batch.indices]
        assert sorted(seen) == list(range(17)), "each picture once, also the one of a size of its own"
    for batch in batches:
        assert len({found.examples[index].bucket for index in batch.indices}) == 1
        assert len(batch.indices) <= 4
    # 13 wide in batches of 4, 3 high, 1 square: 4 + 1 + 1 batches.
    assert len(batches) == 2 * 6
    made = PlannedData(processing, found.examples, 0)
    for planned in batches[:6]:
        batch = made[planned]
        assert batch.real == batch.padded, "nothing is padded"
        width, height = found.examples[planned.indices[0]].bucket
        assert batch.data["pixels"].shape[1:] == (3, height, width)


def test_sizes_have_the_pictures_aspect_ratio(mixed: Path, processing_of) -> None:
    _, found = processing_of(mixed)
    buckets = [example.bucket for example in found.examples]
    assert buckets[0][0] > buckets[0][1]
    assert buckets[13][0] < buckets[13][1]
    assert buckets[16] == (16, 16)
    _, found = processing_of(mixed, data={"image": {"resolution": 16, "step": 4, "min_side": 4, "buckets": False}})
    assert {example.bucket for example in found.examples} == {(16, 16)}


def test_nothing_is_enlarged_on_request_and_what_is_is_counted(tmp_path: Path, paint, processing_of) -> None:
    paint(1, 10, 10).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("x")
    _, found = processing_of(tmp_path)
    assert found.examples[0].bucket == (16, 16)
    assert found.report.noted["pictures enlarged"] == 1
    image = {"resolution": 16, "step": 4, "min_side": 4, "upscale": False}
    _, found = processing_of(tmp_path, data={"image": image})
    assert found.examples[0].bucket == (8, 8)
    assert not found.report.noted


def test_sdxl_is_told_size_and_crop(mixed: Path, processing_of) -> None:
    processing, found = processing_of(mixed, "sdxl")
    encoded = [processing.encode(example, None) for example in found.examples[:2]]
    data = processing.collate(encoded, None)
    width, height = found.examples[0].bucket
    how = encoded[0].crop
    assert data["sizes"].tolist() == [[24.0, 48.0, how.top, how.left, height, width]] * 2
    assert how.left + how.top > 0, "48 x 24 is cropped"


# ---------------------------------------------------------------------------------------------- batches


def test_flips_and_random_crops_follow_the_generator(mixed: Path, processing_of) -> None:
    image = {"resolution": 16, "step": 4, "min_side": 4, "buckets": False, "crop": "random", "flip": 0.5}
    processing, found = processing_of(mixed, data={"image": image})
    example = found.examples[0]
    crops = [processing.encode(example, np.random.default_rng(seed)).crop for seed in range(60)]
    assert {how.flip for how in crops} == {False, True}
    assert len({how.left for how in crops}) > 8
    assert processing.encode(example, np.random.default_rng(5)).crop == crops[5]
    still = processing.encode(example, None).crop
    assert (still.flip, still.left) == (False, 8), "an evaluation sees the middle"


def test_a_picture_that_changes_during_the_run_is_told(tmp_path: Path, paint, processing_of) -> None:
    paint(1).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("x")
    processing, found = processing_of(tmp_path)
    paint(2).save(tmp_path / "a.png")
    with pytest.raises(BadExample) as caught:
        processing.encode(found.examples[0], None)
    assert caught.value.reason == "changed_file"


def test_what_is_shown_says_where_a_picture_comes_from(folder: Path, processing_of) -> None:
    processing, found = processing_of(folder)
    data = processing.collate([processing.encode(found.examples[1], None)], None)
    shown = processing.show(data, 0)
    assert shown.title == "metadata.jsonl:2"
    assert shown.tokens == [("a green line", True)]
    assert shown.facts["picture"] == "16 x 16 pixels"
    assert shown.picture
    beside = processing.beside(data, 0)
    picture = Image.open(io.BytesIO(beside["picture.png"]))
    assert np.array_equal(np.asarray(picture).transpose(2, 0, 1), data["pixels"][0].numpy()), "as it is cropped"
    read = beside["caption tokens"].partition(": ")[2].split(" | ")
    assert processing.words.convert_tokens_to_ids(read) == processing.words("a green line").input_ids


def test_a_bucket_is_a_group_of_its_own(mixed: Path, processing_of) -> None:
    processing, found = processing_of(mixed)
    groups = {example.bucket: processing.group(example) for example in found.examples}
    assert len(set(groups.values())) == len(groups) == 3
    assert processing.cost(found.examples[16]) == 256


# ---------------------------------------------------------------------------------------------- the recipe


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("data", {"cache": {"folder": "x"}, "image": {"crop": "random"}}, "crop to center"),
        ("model", {"freeze_denoiser": True}, "exclude each other"),
        ("model", {"freeze_denoiser": True, "lora": None}, "nothing to train"),
        ("model", {"lora": None, "text_encoder_lora": {"rank": 2}}, "freeze_denoiser: true"),
        ("model", {"lora": {"type": "lokr", "dora": True}}, "of the type lora"),
        ("model", {"lora": {"modules_to_save": ["conv_in"]}}, "modules_to_save"),
        ("model", {"new_tokens": [{"token": "<a>", "start": "x"}] * 2}, "the same"),
        ("task", {"timesteps": {"range": [0.5, 0.5]}}, "not below"),
    ],
)
def test_settings_that_can_t_be_meant_are_refused(section: str, values: Any, message: str, make_recipe) -> None:
    with pytest.raises(RecipeError, match=message):
        make_recipe("sd", **{section: values})


def test_sections_are_bounded() -> None:
    for wrong in ({"flip": 1.5}, {"max_ratio": 0.5}, {"background": (0, 0, 256)}, {"resolution": 0}):
        with pytest.raises(ValidationError):
            ImageSection(**wrong)
