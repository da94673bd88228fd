"""NeMo's batches: features as its own preprocessor gives them, texts, what is refused and what is counted."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import soundfile as sf
import torch

from luthier.common.data.collect import collect
from luthier.common.errors import BadExample, DataError, ModelError
from luthier.modalities.asr.nemo.frames import encoded_frames
from luthier.modalities.asr.nemo.task import Task
from luthier.modalities.asr.utterance import Utterance

pytest.importorskip("nemo")

ROWS = (0, 1, 5, 6, 11)


@pytest.fixture
def processing_of(make_recipe):
    return lambda path, /, **sections: Task.make_processing(make_recipe(path, **sections))


def nemo_s(processing, wave, lengths):
    """Features of a batch by NeMo's preprocessor, as in its evaluation."""
    from nemo.collections.asr.models import ASRModel

    preprocessor = ASRModel.from_config_dict(processing._section).eval()
    return preprocessor(input_signal=wave.clone(), length=lengths)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"normalize": "all_features"},
        {"normalize": "NA", "pad_to": 16},
        {"pad_value": -1.5, "pad_to": 16, "exact_pad": True},
        {"pad_to": 0, "preemph": None, "log_zero_guard_type": "clamp"},
    ],
)
def test_features_of_a_batch_are_nemo_s(processing_of, saved_of, collated, wave_batch, changes):
    """Normalised over each example's own frames, padded as NeMo pads: 6e-5 is float32 rounding of values up to 8."""
    config = {f"preprocessor.{key}": value for key, value in changes.items()}
    processing = processing_of(saved_of("ctc"), model={"config": config})
    batch, (wave, lengths) = collated(processing, ROWS), wave_batch(ROWS)
    expected, frames = nemo_s(processing, wave, lengths)
    assert batch["frames"].tolist() == frames.tolist()
    assert batch["features"].shape == expected.shape
    torch.testing.assert_close(batch["features"], expected, rtol=0, atol=6e-5)


def test_dither_is_on_in_training_only_and_repeats(processing_of, saved_of, collated):
    """As strong as the model has it: normal noise of 1e-2 on the samples."""
    processing = processing_of(saved_of("ctc"), model={"config": {"preprocessor.dither": 1e-2}})
    silence = np.zeros(50_000, np.float32)
    noise = processing.vary(silence, np.random.default_rng(0))
    assert noise.std() == pytest.approx(1e-2, rel=0.02)
    assert np.array_equal(noise, processing.vary(silence, np.random.default_rng(0)))
    plain, varied = (collated(processing, ROWS, generator) for generator in (None, np.random.default_rng(0)))
    assert torch.equal(plain["features"], collated(processing, ROWS)["features"])
    assert not torch.allclose(plain["features"], varied["features"], atol=1e-2)


def test_other_rates_and_channels_are_heard_alike(processing_of, saved_of, tmp_path):
    """faults/asr.md, 9 and 10: a tone at 8 kHz in stereo has its peak where it has it at 16 kHz in mono."""
    processing = processing_of(saved_of("ctc"), model={"config": {"preprocessor.normalize": "NA"}})
    peaks = []
    for rate, channels in ((16000, 1), (8000, 1), (8000, 2), (44100, 2)):
        wave = 0.3 * np.sin(2 * np.pi * 1000 * np.arange(rate) / rate)
        file = tmp_path / f"{rate}-{channels}.wav"
        sf.write(file, np.stack([wave] * channels, 1), rate)
        (item,) = processing.examine(Utterance(str(file), "a", "x:1"), True)
        peaks.append(int(processing.encode(item, None).features[:, 50].argmax()))
    assert len(set(peaks)) == 1


@pytest.mark.parametrize(
    "encoder",
    [
        {},
        {"subsampling": "dw_striding", "subsampling_factor": 8},
        {
            "subsampling": "striding",
            "subsampling_factor": 4,
            "causal_downsampling": True,
            "conv_context_size": "causal",
        },
        {"subsampling": "stacking", "subsampling_factor": 4},
    ],
)
def test_frames_of_the_encoder_are_known_ahead(make_task, config_of, encoder):
    task = make_task(config_of("ctc", **encoder))
    count = encoded_frames(task.processing.origin.config.encoder)
    task.eval()
    for frames in range(8, 60):
        with torch.no_grad():
            _, found = task.nemo.encoder(audio_signal=torch.randn(1, 40, frames), length=torch.tensor([frames]))
        assert int(found) == count(frames), frames


def test_the_shortest_audio_for_a_text(processing_of, saved_of, tmp_path):
    """faults/asr.md, 16: NeMo gives CTC loss 0 to what can't be aligned and trains on nothing. Here it is a bad row."""
    processing = processing_of(saved_of("ctc"))
    file = tmp_path / "a.wav"
    sf.write(file, 0.1 * np.random.default_rng(0).standard_normal(16000), 16000)
    one = Utterance(str(file), "", "x:1", duration=1.0)
    # 1 s is 100 frames, halved twice: 25. A repeated letter needs a frame more.
    for text, fits in (("ab" * 12, True), ("a" * 13, True), ("ab" * 13, False), ("a" * 14, False)):
        if fits:
            processing.check(replace(one, text=text.replace("b", "e")), True)
            continue
        with pytest.raises(BadExample, match="x:1") as caught:
            processing.check(replace(one, text=text.replace("b", "e")), True)
        assert caught.value.reason == "too_short_for_ctc"
    fast = processing_of(saved_of("ctc"), data={"augment": {"speed": [1.0, 2.0]}})
    with pytest.raises(BadExample, match="at least 14"):
        fast.check(replace(one, text="aeaeaeaeaeaeae"), True)


def test_the_most_tokens_of_a_transducer(processing_of, saved_of):
    processing = processing_of(saved_of("rnnt"))
    one = Utterance("", "ae" * 5, "x:1", duration=0.08)  # 8 frames, halved twice: 2, of 5 tokens each
    processing.check(one, True)
    with pytest.raises(BadExample, match="11 tokens, 2 frames") as caught:
        processing.check(replace(one, text=one.text + "a"), True)
    assert caught.value.reason == "too_short_for_rnnt"


@pytest.fixture
def odd(manifest):
    """The 12 rows, and two with characters that the labels lack."""
    rows = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()]
    rows += [{**rows[0], "text": "Hello, wörld"}, {**rows[0], "text": "你好"}]
    file = manifest.parent / "odd.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("subwords", [False, True])
def test_unknown_characters_refuse_the_row(processing_of, saved_of, odd, subwords):
    """faults/asr.md, 13: NeMo lets them vanish, or trains on an unknown mark."""
    processing = processing_of(saved_of("ctc", subwords), data={"train": odd, "max_bad": 0.2})
    report = collect(processing.recipe.data.train, processing, processing.recipe.data).report
    assert report.dropped == {"unknown_characters": 2}
    (one, two) = report.named["unknown_characters"]
    assert "odd.jsonl:13" in one
    assert "',' 'H' 'ö'" in one
    assert "odd.jsonl:14" in two


@pytest.mark.parametrize("subwords", [False, True])
def test_unknown_characters_are_dropped_where_asked_and_counted_one_by_one(processing_of, saved_of, odd, subwords):
    processing = processing_of(
        saved_of("ctc", subwords), data={"train": odd, "max_bad": 0.2}, task={"unknown": "drop", "lowercase": True}
    )
    collected = collect(processing.recipe.data.train, processing, processing.recipe.data)
    assert collected.report.dropped == {"no_known_characters": 1}
    noted = {f"unknown characters dropped: {char!r}": 1 for char in ",ö"}
    assert dict(collected.report.noted) == noted
    ids = processing.target(collected.examples[-1])
    assert ids == processing.tokens.encode("hello wrld", None)


def test_a_reference_that_can_not_be_trained_on_is_still_scored(make_task, saved_of, odd, manifest):
    """faults/asr.md, 13: against the text as it stands in the source; it only has no loss."""
    from luthier.common.data.plan import Planned
    from luthier.common.data.processing import PlannedData

    task = make_task(saved_of("ctc"), data={"train": str(manifest), "validation": odd})
    collected = collect(task.recipe.data.validation, task.processing, task.recipe.data, training=False)
    assert len(collected.examples) == 14
    task.eval()
    with torch.no_grad():
        predicted = task.predict(PlannedData(task.processing, collected.examples, None)[Planned(0, 0, (0, 12, 13))])
        alone = task.predict(PlannedData(task.processing, collected.examples, None)[Planned(0, 0, (0,))])
    assert [one.reference for one in predicted.records] == ["hello world", "Hello, wörld", "你好"]
    assert predicted.loss.count == 1
    assert float(predicted.loss.sum) == pytest.approx(float(alone.loss.sum), rel=1e-4)


def test_the_characters_of_the_data_become_labels(processing_of, config_of, saved_of, pieces):
    from_data = processing_of(config_of("ctc", ["a", "b"]), model={"vocabulary": "data"})
    assert "".join(from_data.tokens.pieces) == "".join(sorted(set("".join(from_data._texts()))))
    with pytest.raises(ModelError, match="writes subwords"):
        processing_of(saved_of("ctc", True), model={"vocabulary": "data"})
    with pytest.raises(ModelError, match="writes characters"):
        processing_of(saved_of("ctc"), model={"vocabulary": pieces})
    with pytest.raises(ModelError, match=r"names no labels[^$]*vocabulary: data"):
        processing_of(config_of("ctc", []))


def test_subwords_are_nemo_s(make_task, saved_of):
    task = make_task(saved_of("ctc", True))
    for text in ("hello world", "a", "two of  two"):
        assert task.processing.tokens.encode(text, None) == task.nemo.tokenizer.text_to_ids(text)


def test_labels_of_several_letters_are_nemo_s(make_task, config_of):
    """NeMo's character parser takes a whole word for one label where there is such a label."""
    from nemo.collections.common.parts.preprocessing.parsers import make_parser

    labels = [" ", *"abc", "<noise>"]
    task = make_task(config_of("ctc", labels), task={"unknown": "drop"}, model={"vocabulary": "model"})
    tokens = task.processing.tokens
    for text in ("ab <noise> c", "a<noise>", "ab d"):
        assert tokens.encode(text, None) == make_parser(labels, "base", do_normalize=False)(text)
    assert tokens.unknown("a <noise> <b>", None) == {"<", ">"}


def test_a_cache_keeps_features_in_half_precision(processing_of, saved_of, collated, tmp_path):
    cached = processing_of(saved_of("ctc"), data={"cache": {"folder": str(tmp_path)}})
    plain = collated(processing_of(saved_of("ctc")), ROWS)
    first, again = collated(cached, ROWS, np.random.default_rng(0)), collated(cached, ROWS)
    assert torch.equal(first["features"], again["features"])
    torch.testing.assert_close(again["features"], plain["features"], rtol=2**-11, atol=1e-4)
    assert any(tmp_path.rglob("*.npy"))


def test_a_batch_can_be_looked_at(processing_of, saved_of, collated):
    processing = processing_of(saved_of("ctc"))
    shown = processing.show(collated(processing, (1,)), 0)
    assert "".join(piece for piece, _ in shown.tokens) == "good day" == shown.facts["text"]
    assert shown.facts["features"] == "96 of 97 frames"  # 0.96 s, and the frame that NeMo adds


def test_too_many_bad_rows_refuse_the_run(processing_of, saved_of, odd):
    processing = processing_of(saved_of("ctc"), data={"train": odd, "max_bad": 0.1})
    with pytest.raises(DataError, match="unknown_characters"):
        collect(processing.recipe.data.train, processing, processing.recipe.data)
