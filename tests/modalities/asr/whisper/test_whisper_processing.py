"""Whisper's batches: features as transformers' extractor gives them, contexts, repeatability, the feature cache."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import soundfile as sf
import torch
import transformers as hf

from luthier.common.data.collect import collect
from luthier.common.data.plan import Planned
from luthier.common.data.processing import PlannedData
from luthier.common.errors import BadExample, RecipeError
from luthier.modalities.asr.features import LogMel
from luthier.modalities.asr.utterance import Utterance

FULL = 200  # frames of 2 s
HALF = 2**-11  # half precision below 2, which these features stay under, is at most this far off
DYNAMIC = {"audio_context": "dynamic", "context_margin": 0.1, "long_context_share": 0.1}


def waves(utterances) -> list[np.ndarray]:
    return [sf.read(item.audio, dtype="float32")[0] for item in utterances]


def extracted(path: str, utterances) -> torch.Tensor:
    """Features by transformers' extractor, padded to 2 s."""
    extractor = hf.WhisperFeatureExtractor.from_pretrained(path)
    return extractor(waves(utterances), sampling_rate=16000, return_tensors="pt").input_features


def batch_of(data: PlannedData, *indices: int, number: int = 0, epoch: int = 0):
    return data[Planned(number, epoch, indices)].data


# ---------------------------------------------------------------------------------------------- features


def test_features_of_a_batch_equal_the_extractor_s(make_processing, multilingual, examples, collated):
    processing = make_processing(multilingual)
    batch = collated(processing, range(12))
    expected = extracted(multilingual, examples(processing))
    assert batch["features"].shape == (12, 80, FULL)
    torch.testing.assert_close(batch["features"], expected, rtol=0, atol=1e-6)


def test_features_of_a_short_context_are_the_beginning(make_processing, multilingual, examples, collated):
    processing = make_processing(multilingual, model=DYNAMIC | {"long_context_share": 0})
    batch = collated(processing, range(4), np.random.default_rng(0))
    frames = batch["features"].shape[2]
    assert frames < FULL
    expected = extracted(multilingual, examples(processing)[:4])[..., :frames]
    torch.testing.assert_close(batch["features"], expected, rtol=0, atol=1e-6)


def test_other_rates_and_channels_are_heard_alike(make_processing, multilingual, tmp_path):
    """A tone at 8 kHz in stereo has its peak in the mel bin that it has at 16 kHz (faults/asr.md, 9 and 10)."""
    processing = make_processing(multilingual)
    peaks = []
    for rate, channels in ((16000, 1), (8000, 1), (8000, 2), (44100, 2)):
        wave = 0.3 * np.sin(2 * np.pi * 1000 * np.arange(rate) / rate)
        file = tmp_path / f"{rate}-{channels}.wav"
        sf.write(file, np.stack([wave] * channels, 1), rate)
        (item,) = processing.examine(Utterance(str(file), "a", "x:1", language="en"), True)
        mel = processing.encode(item, None).mel
        assert abs(mel.shape[1] - 100) <= 2
        peaks.append(int(mel[:, 50].argmax()))
    assert len(set(peaks)) == 1


def test_what_the_batch_says_of_its_examples(make_processing, multilingual, examples, collated):
    processing = make_processing(multilingual)
    batch, chosen = collated(processing, (2, 0)), [examples(processing)[i] for i in (2, 0)]
    assert [item.text for item in batch["utterances"]] == ["你好 世界", "hello world"]
    assert [item.duration for item in chosen] == pytest.approx([0.8, 0.6])
    # 100 frames a second, and one or two whose windows still reach the sound.
    assert [int(n) - frames for n, frames in zip(batch["frames"], (80, 60), strict=True)] == [2, 2]
    targets = [processing.targets.target(item) for item in chosen]
    assert batch["ctc_labels"].tolist() == [token for target in targets for token in target.text[:-1]]
    assert batch["ctc_lengths"].tolist() == [13, 11]  # 13 bytes of UTF-8
    assert batch["keys"] == [None, None]


def test_audio_longer_than_the_model_hears_is_refused(make_processing, multilingual, tmp_path):
    """Whatever the recipe allows: transformers would clip it and keep the whole text."""
    processing = make_processing(multilingual, data={"audio": {"max_seconds": 30}})
    file = tmp_path / "long.wav"
    for samples, fits in ((32000, True), (32200, False)):
        sf.write(file, 0.1 * np.random.default_rng(0).standard_normal(samples), 16000)
        utterance = Utterance(str(file), "a", "x:1", language="en")
        if fits:
            assert processing.encode(processing.examine(utterance, True)[0], None).mel.shape[1] == FULL
            continue
        with pytest.raises(BadExample, match=r"x:1") as caught:
            processing.examine(utterance, True)
        assert caught.value.reason == "too_long"


# ---------------------------------------------------------------------------------------------- context


def encoded(processing, frames: int):
    mel = torch.zeros(80, frames)
    target = processing.targets.target(Utterance("", "a", "x:1", language="en", duration=1.0))
    from luthier.modalities.asr.whisper.processing import Encoded

    return [Encoded(mel, -1.5, target, Utterance("", "a", "x:1"), None)]


@pytest.mark.parametrize("longest", [1, 41, 100, 185, 191, 200])
def test_dynamic_contexts(make_processing, multilingual, longest):
    """Even, never shorter than the audio with its margin, never longer than the model's; a share is longer."""
    draws, share = 2000, 0.1
    processing = make_processing(multilingual, model=DYNAMIC)
    items = encoded(processing, longest) + encoded(processing, 1)
    needed = min(FULL, longest + 10)  # margin 0.1 s
    found = np.array([processing.frames(items, np.random.default_rng([7, 1, 0, number])) for number in range(draws)])
    assert (found % 2 == 0).all()
    assert found.min() == math.ceil(needed / 2) * 2
    assert found.max() <= FULL
    # Of the long contexts, drawn evenly from `needed` to FULL, those that round to the shortest don't show.
    drawn = np.ceil(np.arange(needed, FULL + 1) / 2) * 2
    probability = share * float((drawn > found.min()).mean())
    bound = 4 * math.sqrt(draws * probability * (1 - probability))
    assert abs((found > found.min()).sum() - draws * probability) <= bound
    if probability > 0.05:
        assert found.max() > FULL - 20


@pytest.mark.parametrize(("share", "expected"), [(0.0, {FULL // 2}), (1.0, None)])
def test_dynamic_contexts_at_the_ends_of_the_share(make_processing, multilingual, share, expected):
    processing = make_processing(multilingual, model=DYNAMIC | {"long_context_share": share})
    found = {processing.frames(encoded(processing, 90), np.random.default_rng(n)) for n in range(2000)}
    assert found == (expected or set(range(100, 201, 2)))


def test_contexts_of_evaluation(make_processing, multilingual):
    """Full unless the evaluation says otherwise, and then never longer than needed."""
    for training in ("full", "dynamic"):
        model = DYNAMIC | {"audio_context": training, "long_context_share": 1.0}
        processing = make_processing(multilingual, model=model)
        assert processing.frames(encoded(processing, 90), None) == FULL
        processing = make_processing(multilingual, model=model, evaluate={"audio_context": "dynamic"})
        assert {processing.frames(encoded(processing, 90), None) for _ in range(50)} == {100}
    processing = make_processing(multilingual, evaluate={"audio_context": "dynamic"})
    assert processing.frames(encoded(processing, 90), np.random.default_rng(0)) == FULL


# ---------------------------------------------------------------------------------------------- repeatability


AUGMENTED = {
    "augment": {"speed": [0.9, 1.1], "gain_db": [-6, 6], "time_masks": 2, "time_mask_max": 0.2, "frequency_masks": 1}
}


def equal(one, other) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[key], other[key]) if isinstance(one[key], torch.Tensor) else one[key] == other[key]
        for key in one
    )


def test_the_same_place_in_the_plan_gives_the_same_batch(make_processing, multilingual, examples):
    sections = {"model": DYNAMIC | {"long_context_share": 0.5}, "data": AUGMENTED}
    first, second = (make_processing(multilingual, **sections) for _ in range(2))
    items = examples(first)
    one, other = PlannedData(first, items, 3), PlannedData(second, items, 3)
    for number in range(4):
        assert equal(batch_of(one, 0, 5, number=number), batch_of(other, 0, 5, number=number))
    assert not equal(batch_of(one, 0, 5), batch_of(one, 0, 5, epoch=1))
    assert not equal(batch_of(one, 0, 5), batch_of(PlannedData(first, items, 4), 0, 5))


def test_an_example_is_augmented_alike_in_any_batch(make_processing, multilingual, examples):
    data = PlannedData(processing := make_processing(multilingual, data=AUGMENTED), examples(processing), 3)
    alone, together = batch_of(data, 5), batch_of(data, 2, 5)
    assert torch.equal(alone["features"][0], together["features"][1])


def test_evaluation_is_not_augmented(make_processing, multilingual, examples):
    processing = make_processing(multilingual, data=AUGMENTED)
    items = examples(processing)
    batch = batch_of(PlannedData(processing, items, None), 0, 1, 2)
    torch.testing.assert_close(batch["features"], extracted(multilingual, items[:3]), rtol=0, atol=1e-6)


def test_speed_stretches_timestamps(make_processing, multilingual, examples):
    processing = make_processing(multilingual, task={"timestamps": True}, data={"augment": {"speed": [0.8]}})
    item = examples(processing)[2]  # 0.8 s, heard for 1 s
    names = processing.processor.tokenizer.convert_ids_to_tokens
    slow = processing.encode(item, np.random.default_rng(0))
    assert slow.mel.shape[1] == pytest.approx(100, abs=2)
    assert names(slow.target.text[-2]) == "<|1.00|>"
    assert names(processing.encode(item, None).target.text[-2]) == "<|0.80|>"


def test_masks_leave_the_padding_alone(make_processing, multilingual, examples):
    """The constant after the audio comes from the unmasked features."""
    data = {"augment": {"frequency_masks": 40, "frequency_mask_max": 80}}
    processing = make_processing(multilingual, data=data)
    items = examples(processing)[:4]
    batch = batch_of(PlannedData(processing, items, 0), 0, 1, 2, 3)
    plain = extracted(multilingual, items)
    for row, frames in enumerate(batch["frames"]):
        assert not torch.allclose(batch["features"][row, :, :frames], plain[row, :, :frames], atol=1e-3)
        torch.testing.assert_close(batch["features"][row, :, frames:], plain[row, :, frames:], rtol=0, atol=1e-6)


# ---------------------------------------------------------------------------------------------- cache


@pytest.fixture
def computed(monkeypatch) -> list[int]:
    """Lengths of the clips whose features are computed, as they are."""
    lengths: list[int] = []
    plain = LogMel.__call__

    def counted(self, wave):
        lengths.append(len(wave))
        return plain(self, wave)

    monkeypatch.setattr(LogMel, "__call__", counted)
    return lengths


def test_the_cache_changes_features_by_half_precision_only(make_processing, multilingual, examples, tmp_path, computed):
    plain = make_processing(multilingual)
    cached = make_processing(multilingual, data={"cache": {"folder": str(tmp_path / "cache")}})
    items = examples(plain)
    expected = batch_of(PlannedData(plain, items, 0), *range(12))
    computed.clear()
    first = batch_of(PlannedData(cached, items, 0), *range(12))
    assert len(computed) == 12
    torch.testing.assert_close(first["features"], expected["features"], rtol=0, atol=HALF)
    assert torch.equal(first["labels"], expected["labels"])
    assert len(set(first["keys"])) == 12
    # Another process and epoch: nothing is computed, nothing differs.
    again = make_processing(multilingual, data={"cache": {"folder": str(tmp_path / "cache")}})
    assert equal(batch_of(PlannedData(again, items, 0), *range(12), epoch=1), first)
    assert equal(batch_of(PlannedData(again, items, None), *range(12)), first)
    assert len(computed) == 12


def test_a_full_cache_gives_the_same_features(make_processing, multilingual, examples, tmp_path, computed):
    """With room for a few files only, others are computed again, in the same precision."""
    folder = {"folder": str(tmp_path / "cache")}
    roomy = make_processing(multilingual, data={"cache": folder})
    tight = make_processing(multilingual, data={"cache": {"folder": str(tmp_path / "tight"), "max_gb": 5e-5}})
    items = examples(roomy)
    expected = batch_of(PlannedData(roomy, items, 0), *range(12))
    for epoch in range(2):
        computed.clear()
        assert equal(batch_of(PlannedData(tight, items, 0), *range(12), epoch=epoch), expected)
        assert len(computed) > 6


def test_masks_go_with_a_cache_and_stay_out_of_it(make_processing, multilingual, examples, tmp_path):
    data = {"cache": {"folder": str(tmp_path / "cache")}, "augment": {"time_masks": 3, "time_mask_max": 0.3}}
    processing = make_processing(multilingual, data=data)
    items = examples(processing)[:3]
    masked = [batch_of(PlannedData(processing, items, 0), 0, 1, 2, epoch=epoch) for epoch in range(2)]
    assert not torch.equal(masked[0]["features"], masked[1]["features"])
    plain = batch_of(PlannedData(processing, items, None), 0, 1, 2)
    torch.testing.assert_close(plain["features"], extracted(multilingual, items), rtol=0, atol=HALF)


@pytest.mark.parametrize("change", ["speed", "gain_db", "noise", "reverb"])
def test_a_cache_with_varied_audio_is_refused(make_recipe, multilingual, manifest, tmp_path, change):
    folder = str(manifest.parent)
    augment = {
        "speed": {"speed": [0.9, 1.1]},
        "gain_db": {"gain_db": [-3, 3]},
        "noise": {"noise_folder": folder, "noise_snr_db": [5, 20], "noise_probability": 0.5},
        "reverb": {"reverb_folder": folder, "reverb_probability": 0.5},
    }[change]
    make_recipe(multilingual, data={"augment": augment})
    with pytest.raises(RecipeError, match=r"data\.cache"):
        make_recipe(multilingual, data={"augment": augment, "cache": {"folder": str(tmp_path)}})


# ---------------------------------------------------------------------------------------------- rows


def test_every_row_is_accounted_for(make_processing, multilingual, manifest):
    """Good and bad rows of one manifest: what is refused is named with its row and counted by its reason."""
    folder = manifest.parent
    (folder / "broken.wav").write_bytes(b"RIFF\x10\x00\x00\x00WAVEnonsense")
    row = json.loads(manifest.read_text(encoding="utf-8").splitlines()[0])
    changes = [
        {},
        {"audio": "broken.wav"},
        {"audio": "absent.wav"},
        {"language": "fr"},
        {"language": None},
        {"text": "a" * 70},
        {"text": "<|endoftext|>"},
        {"duration": 5.0},
        {},
    ]
    file = folder / "mixed.jsonl"
    file.write_text("".join(json.dumps(row | change) + "\n" for change in changes), encoding="utf-8")
    processing = make_processing(multilingual, data={"train": str(file), "max_bad": 1.0})
    report = collect(processing.recipe.data.train, processing, processing.recipe.data).report
    reasons = [
        "corrupt_audio", "missing_file", "unknown_language", "no_language",
        "text_too_long", "control_token", "wrong_duration",
    ]  # fmt: skip
    assert dict(report.dropped) == dict.fromkeys(reasons, 1)
    assert (report.rows, report.kept_rows) == (9, 2)
    for number, reason in enumerate(reasons, 2):
        assert f"mixed.jsonl:{number}:" in report.named[reason][0]


def test_pieces_of_a_long_recording_have_their_own_targets(make_processing, multilingual, tmp_path):
    file = tmp_path / "long.wav"
    sf.write(file, 0.1 * np.random.default_rng(0).standard_normal(48000), 16000)
    row = {"audio": str(file), "text": "one two", "language": "en", "prompt": "so"}
    row["segments"] = [{"start": 0.2, "end": 1.4, "text": "one"}, {"start": 1.6, "end": 2.9, "text": "two"}]
    rows = tmp_path / "long.jsonl"
    rows.write_text(json.dumps(row), encoding="utf-8")
    data = {"train": str(rows), "audio": {"over_long": "segment"}}
    processing = make_processing(multilingual, task={"timestamps": True}, data=data)
    pieces = collect(processing.recipe.data.train, processing, processing.recipe.data).examples
    decode = processing.processor.tokenizer.decode
    written = [decode(processing.targets.target(piece).text, decode_with_timestamps=True) for piece in pieces]
    assert [piece.text for piece in pieces] == ["one", "two"]
    assert ["<|0.00|>" in text and end in text for text, end in zip(written, ("<|1.20|>", "<|1.30|>"), strict=True)]
    assert [bool(processing.targets.target(piece).prompt) for piece in pieces] == [True, False]
    assert [len(processing.encode(piece, None).mel[0]) for piece in pieces] == pytest.approx([120, 130], abs=2)
    assert replace(pieces[1], text="two").duration == pytest.approx(1.3)
