"""Batches of CTC models: samples and features as the model's own extractor gives them, checks, augmentation, pieces."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
import soundfile as sf
import torch
import transformers as hf

from luthier.common.data.collect import collect
from luthier.common.errors import LuthierError, ModelError, RecipeError
from luthier.modalities.asr.ctc.config import StreamSection
from luthier.modalities.asr.ctc.model import frames


def waves(utterances) -> list[np.ndarray]:
    return [sf.read(item.audio, dtype="float32")[0] for item in utterances]


@pytest.mark.parametrize("family", ["wav2vec2:group", "wav2vec2-bert", "parakeet_ctc"])
def test_inputs_are_those_of_the_extractor_for_each_recording(make_processing, model_of, collated, family):
    """Samples are normalised over the real ones only, whatever the longest of the batch is."""
    path = model_of(family)
    processing = make_processing(path)
    data = collated(processing)
    extractor = hf.AutoFeatureExtractor.from_pretrained(path)
    for row, length, wave in zip(data["features"], data["lengths"].tolist(), waves(data["utterances"]), strict=True):
        alone = extractor([wave], sampling_rate=16000, return_tensors="pt", return_attention_mask=True)
        expected = alone[extractor.model_input_names[0]][0]
        assert length == int(alone.attention_mask.sum())
        torch.testing.assert_close(row[:length], expected[:length], rtol=0, atol=1e-6)
        assert (row[length:] == 0).all()
        if family == "wav2vec2:group":
            assert float(row[:length].mean()) == pytest.approx(0, abs=1e-4)
            assert float(row[:length].std()) == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize("family", ["wav2vec2:group", "hubert:layer", "wav2vec2-bert", "parakeet_ctc"])
def test_frames_are_known_without_running_the_model(make_processing, model_of, family):
    path = model_of(family)
    hearing = make_processing(path).hearing
    model = hf.AutoModelForCTC.from_pretrained(path).eval()
    for samples in (4000, 4001, 7777, 16000, 16319, 16320, 23456):
        features = hearing(np.random.default_rng(samples).standard_normal(samples).astype(np.float32))
        with torch.no_grad():
            inputs = features if hearing.raw else features.T[None]
            expected = model(inputs).logits.shape[1]
        assert hearing.frames(samples) == expected, samples
        assert int(frames(model.config, torch.tensor([features.shape[1]]))[0]) == expected
    assert hearing.samples_per_frame == {"wav2vec2:group": 320, "hubert:layer": 320, "wav2vec2-bert": 320}.get(
        family, 640
    )


def test_examples_too_short_for_ctc_are_counted_before_training(make_processing, wav2vec2, changed):
    """Fault 16. Row 1 has 0.6 s: a letter for each of its frames fits if no two neighbours are equal."""
    hearing = make_processing(wav2vec2).hearing
    count = hearing.frames(9600)
    full = ("ab" * count)[:count]
    texts = (full, full[:-1] + full[-2], full + "c")
    for number, (text, fits) in enumerate(zip(texts, (True, False, False), strict=True)):
        processing = make_processing(wav2vec2, data={"train": changed(f"short{number}", text, "ok"), "max_bad": 0.9})
        report = collect(processing.recipe.data.train, processing, processing.recipe.data).report
        assert dict(report.dropped) == ({} if fits else {"too_short_for_ctc": 1}), text
    data = {"train": changed("fast", full, "ok"), "max_bad": 0.9, "augment": {"speed": [0.9, 1.5]}}
    processing = make_processing(wav2vec2, data=data)
    report = collect(processing.recipe.data.train, processing, processing.recipe.data).report
    assert dict(report.dropped) == {"too_short_for_ctc": 1}, "at the fastest speed it has fewer frames"


def test_raw_audio_has_no_features_to_keep_or_mask(make_processing, model_of, tmp_path):
    raw, mel = model_of("wav2vec2:group"), model_of("wav2vec2-bert")
    for data in ({"cache": {"folder": str(tmp_path)}}, {"augment": {"time_masks": 2}}):
        with pytest.raises(ModelError, match="samples"):
            make_processing(raw, data=data)
        make_processing(mel, data=data)


def test_masks_come_from_one_place(make_recipe, wav2vec2):
    with pytest.raises(RecipeError, match=r"model\.mask"):
        make_recipe(wav2vec2, model={"mask": {}}, data={"augment": {"time_masks": 2}})


def test_a_model_without_masks_of_its_own_says_so(make_task, model_of):
    with pytest.raises(ModelError, match=r"model\.mask"):
        make_task(model_of("parakeet_ctc"), model={"mask": {}})


def test_cached_features_are_the_same_up_to_half_precision(make_processing, model_of, collated, tmp_path):
    path = model_of("wav2vec2-bert")
    plain = collated(make_processing(path))
    cached = make_processing(path, data={"cache": {"folder": str(tmp_path)}})
    first, again = collated(cached), collated(cached)
    assert torch.equal(first["features"], again["features"])
    torch.testing.assert_close(first["features"], plain["features"], rtol=2**-10, atol=2**-10)


def test_a_text_that_cannot_be_trained_on_is_still_a_reference(make_task, wav2vec2, examples, collated):
    from luthier.common.data.processing import Batch

    task = make_task(wav2vec2).eval()
    items = [
        replace(item, text=text) for item, text in zip(examples(task.processing), ("Ça va?", "good"), strict=False)
    ]
    data = task.processing.collate([task.processing.encode(item, None) for item in items], None)
    assert data["label_lengths"].tolist() == [0, 4]
    found = task.predict(Batch(0, 0, (0, 1), data, 1.0, 1.0))
    assert [record.reference for record in found.records] == ["Ça va?", "good"]
    assert found.loss.count == 4
    alone = task.predict(
        Batch(0, 0, (0,), task.processing.collate([task.processing.encode(items[1], None)], None), 1, 1)
    )
    assert float(found.loss.sum) == pytest.approx(float(alone.loss.sum), rel=1e-5)


# ---------------------------------------------------------------------------------------------- pieces


@pytest.mark.parametrize("family", ["wav2vec2:group", "wav2vec2-bert", "parakeet_ctc"])
@pytest.mark.parametrize("samples", [16000, 40000, 52345])
def test_pieces_join_to_the_frames_of_the_whole(make_processing, model_of, family, samples):
    hearing = make_processing(model_of(family)).hearing
    section = StreamSection(chunk_seconds=0.5, left_seconds=0.3, right_seconds=0.2)
    pieces = hearing.pieces(samples, section)
    covered = 0
    for piece in pieces:
        available = hearing.frames(piece.last - piece.first)
        end = available if piece.end is None else piece.end
        assert end <= available
        assert piece.first // hearing.samples_per_frame + piece.begin == covered
        covered += end - piece.begin
        heard_until = (covered * hearing.samples_per_frame + 0.2 * 16000) / 16000
        assert piece.last <= samples
        # What is waited for: right context, and what the last frame itself needs.
        assert piece.last / 16000 <= heard_until + 0.1
    assert covered == hearing.frames(samples)
    assert len(pieces) > 1


@pytest.mark.parametrize("family", ["wav2vec2:layer", "parakeet_ctc"])
def test_streaming_with_all_of_the_context_is_the_whole(make_task, model_of, collated, family):
    """Pieces of one chunk that is longer than everything; then of short ones, which can only be near."""
    path = model_of(family)
    task = make_task(path).eval()
    whole, frames_of = task.heard(collated(task.processing))
    streaming = make_task(path, evaluate={"stream": {"chunk_seconds": 30}}).eval()
    data = collated(streaming.processing)
    found, counts = streaming.heard(data)
    assert torch.equal(counts, frames_of)
    torch.testing.assert_close(found, whole, rtol=0, atol=2e-5)
    short = make_task(
        path, evaluate={"stream": {"chunk_seconds": 0.2, "left_seconds": 0.2, "right_seconds": 0.1}}
    ).eval()
    data = collated(short.processing)
    assert len(data["features"]) > len(data["utterances"]) == len(data["pieces"])
    pieces, counts = short.heard(data)
    assert torch.equal(counts, frames_of)
    assert pieces.shape == whole.shape


def test_shown(make_processing, wav2vec2, collated):
    processing = make_processing(wav2vec2, task={"unknown": "drop"})
    shown = processing.show(collated(processing), 1)
    assert "".join(token for token, _ in shown.tokens) == "ciao|bella"
    assert shown.facts["text"] == "ciao bella"
    assert f"{processing.hearing.frames(11200)} output frames" in shown.facts["input"]
    beside = processing.beside(collated(processing), 1)
    heard, rate = sf.read(io.BytesIO(beside["audio.flac"]))
    assert (len(heard), rate) == (11200, processing.rate)
    assert beside["text as it is scored"] == "ciao bella"
    assert "features.png" not in beside, "this model hears samples"


def test_unusable_models_are_named(make_processing, tmp_path):
    with pytest.raises(LuthierError, match=r"model\.path"):
        make_processing(str(tmp_path / "absent"))
    hf.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1).save_pretrained(tmp_path)
    with pytest.raises(LuthierError):
        make_processing(str(tmp_path))
