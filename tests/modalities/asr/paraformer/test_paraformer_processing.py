"""Features, checks and batches of Paraformer; what FunASR's data path drops or damages without a word."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
import torch

from luthier.common.errors import BadExample, RecipeError
from luthier.modalities.asr.paraformer.processing import _POSITIONS
from luthier.modalities.asr.paraformer.tokens import spell

RATE = 16000


def wave_of(manifest: Path, number: int) -> np.ndarray:
    return sf.read(manifest.parent / f"{number}.wav", dtype="float32")[0]


def funasr_features(path: str, wave: np.ndarray, **changes: object) -> torch.Tensor:
    """[T, F] of FunASR's frontend."""
    import yaml
    from funasr.frontends.wav_frontend import WavFrontend

    settings = yaml.safe_load((Path(path) / "config.yaml").read_text())["frontend_conf"] | changes
    cmvn = Path(path) / "am.mvn"
    frontend = WavFrontend(cmvn_file=str(cmvn) if cmvn.exists() else None, **settings)
    return frontend(torch.from_numpy(wave)[None], torch.tensor([len(wave)]))[0][0]


# ---------------------------------------------------------------------------------------------- features


@pytest.mark.parametrize("kind", ["sanm", "conformer"])
@pytest.mark.parametrize("number", [0, 5, 11])
def test_features_are_funasr_s(request, make_processing, gathered, manifest, kind, number):
    """With low frame rate and normalisation in the first, without in the second."""
    path = request.getfixturevalue(kind)
    processing = make_processing(path)
    found = processing.encode(gathered(processing).examples[number], None).features
    expected = funasr_features(path, wave_of(manifest, number), dither=0.0)
    assert found.shape == expected.shape == (processing.frontend.frames(len(wave_of(manifest, number))), found.shape[1])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("stacked", [(7, 6), (5, 3), (4, 4), (1, 2)])
def test_frames_of_every_length(directory_of, make_processing, stacked):
    """What is planned with is what comes out, at the borders of frames too."""
    processing = make_processing(
        directory_of("conformer", weights=False, frontend_conf={"lfr_m": stacked[0], "lfr_n": stacked[1]})
    )
    for samples in (400, 401, 559, 560, 561, 1200, 4000, 9999):
        features = processing.frontend.assemble(processing.features(np.ones(samples, np.float32)))
        assert features.shape == (processing.frontend.frames(samples), 80 * stacked[0])


@pytest.mark.parametrize("layer", ["conv2d", "conv2d2", "conv2d6", "conv2d8"])
def test_positions_are_the_encoder_s(directory_of, make_task, layer):
    task = make_task(directory_of("conformer", weights=False, encoder_conf={"input_layer": layer})).eval()
    for frames in (20, 21, 22, 23, 57, 58, 59, 60, 61):
        with torch.no_grad():
            out, _ = task.paraformer.encode(torch.randn(1, frames, 80), torch.tensor([frames]))
        assert out.shape[1] == task.processing.positions(frames) == _POSITIONS[layer](frames)


def test_fault_14_no_dither_outside_training(directory_of, make_processing, gathered, manifest):
    """FunASR's default makes the features of an evaluation random, and AutoModel's transcripts with them."""
    path = directory_of("sanm", weights=False, frontend_conf={"dither": 1.0})
    assert not torch.equal(*(funasr_features(path, wave_of(manifest, 0)) for _ in range(2)))
    plain, noisy = make_processing(path), make_processing(path, model={"dither": 1.0})
    example = gathered(plain).examples[0]
    expected = plain.encode(example, None).features
    for processing in (plain, noisy):
        assert torch.equal(processing.encode(example, None).features, expected)
    assert torch.equal(plain.encode(example, np.random.default_rng(0)).features, expected)
    first, again, other = (noisy.encode(example, np.random.default_rng(seed)).features for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_dither_is_noise_in_steps_of_16_bits(make_processing, sanm):
    processing = make_processing(sanm, model={"dither": 3.0})
    noise = processing.vary(np.zeros(100_000, np.float32), np.random.default_rng(0)) * 2**15
    assert noise.std() == pytest.approx(3.0, rel=0.02)


def test_masks_lie_on_the_energies_not_on_stacked_frames(make_processing, sanm, gathered):
    """A band of frequencies is masked in all 7 of the frames that stand side by side."""
    augment = {"frequency_masks": 1, "frequency_mask_max": 40}
    processing = make_processing(sanm, data={"train": make_processing(sanm).recipe.data.train, "augment": augment})
    example = gathered(processing).examples[11]
    plain = processing.encode(example, None).features
    masked = processing.encode(example, np.random.default_rng(1)).features
    changed = (plain != masked).all(0).reshape(7, 80)
    assert changed.any()
    assert (changed == changed[0]).all()


def test_cached_features_are_the_energies(make_processing, sanm, gathered, tmp_path, manifest):
    data = {"train": str(manifest), "cache": {"folder": str(tmp_path / "cache")}}
    plain, cached = make_processing(sanm), make_processing(sanm, data=data)
    example = gathered(plain).examples[3]
    first, again = (cached.encode(example, None).features for _ in range(2))
    assert torch.equal(first, again)
    assert len(list((tmp_path / "cache").rglob("*.npy"))) == 1
    # Half precision: 11 bits of energies below 32, times a scale of at most 0.25.
    torch.testing.assert_close(first, plain.encode(example, None).features, rtol=0, atol=2**-7 * 0.25)


@pytest.mark.parametrize("section", [{"model": {"dither": 1.0}}, {"data": {"augment": {"speed": [0.9, 1.1]}}}])
def test_a_cache_refuses_varied_audio(make_recipe, sanm, tmp_path, manifest, section):
    data = {"train": str(manifest), "cache": {"folder": str(tmp_path)}, **section.get("data", {})}
    model = {"path": sanm, **section.get("model", {})}
    with pytest.raises(RecipeError, match="keeps features of the audio as it is"):
        make_recipe(sanm, data=data, model=model)


# ---------------------------------------------------------------------------------------------- checks


def test_fault_13_unknown_characters_are_named_and_counted(make_processing, sanm, gathered, rows_of):
    """FunASR turns them into <unk> without a word."""
    rows = rows_of("你好world", "早上好", "今天天气!")
    refused = make_processing(sanm, data={"train": rows, "max_bad": 0.5})
    report = gathered(refused).report
    assert dict(report.dropped) == {"unknown_tokens": 2}
    assert report.kept_rows == 10
    assert "w o r l d" in report.named["unknown_tokens"][0]
    kept = make_processing(sanm, data={"train": rows}, task={"kind": "asr.paraformer", "unknown": "keep"})
    collected = gathered(kept)
    assert dict(collected.report.dropped) == {}
    assert dict(collected.report.noted) == {"unknown tokens": 5 + 1}
    ids = kept.encode(collected.examples[0], None).ids
    assert kept.tokens.written(ids) == ["你", "好", *["<unk>"] * 5]


@pytest.mark.parametrize(("form", "found"), [("lower", "你 world!"), ("normalized", "你 world"), ("raw", "你 WORLD!")])
def test_what_is_trained_of_a_text(make_processing, sanm, gathered, form, found):
    processing = make_processing(sanm, task={"kind": "asr.paraformer", "text": form})
    example = replace(gathered(processing).examples[0], text=" 你  WORLD!\t")
    assert processing.tokens.text(example) == found


def test_fault_14_rows_of_30_seconds_are_kept(make_processing, sanm, gathered, tmp_path):
    """FunASR's index drops rows of 2,048 frames and more without a word; longer ones are refused here, by name."""
    folder = tmp_path / "long"
    folder.mkdir()
    lines = []
    for name, seconds in (("a", 30.0), ("b", 30.01), ("c", 20.48)):
        noise = 0.1 * np.random.default_rng(0).standard_normal(int(seconds * RATE))
        sf.write(folder / f"{name}.wav", noise, RATE, subtype="PCM_16")
        lines.append(json.dumps({"key": name, "source": f"{name}.wav", "target": "你好"}, ensure_ascii=False))
    (folder / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    processing = make_processing(sanm, data={"train": str(folder / "rows.jsonl"), "max_bad": 0.5})
    collected = gathered(processing)
    assert [example.duration for example in collected.examples] == [30.0, 20.48]
    assert dict(collected.report.dropped) == {"too_long": 1}


def test_fault_14_a_row_without_source_len_costs_its_real_length(make_processing, sanm, gathered, tmp_path, manifest):
    """FunASR counts it as one frame, and its batches overflow."""
    rows = [{"key": str(n), "source": str(manifest.parent / f"{n}.wav"), "target": "你好"} for n in (0, 11)]
    rows[1]["source_len"] = 3  # and a wrong one decides nothing
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    processing = make_processing(sanm, data={"train": str(file)})
    costs = [processing.cost(example) for example in gathered(processing).examples]
    assert costs == pytest.approx([0.6, 1.7])


def test_fault_14_a_path_called_aishell_keeps_its_spaces(directory_of, make_processing, gathered, tmp_path, manifest):
    """FunASR strips the target's spaces where the path holds this word."""
    folder = tmp_path / "aishell"
    folder.mkdir()
    (folder / "a.wav").write_bytes((manifest.parent / "11.wav").read_bytes())
    (folder / "rows.jsonl").write_text(json.dumps({"source": "a.wav", "target": "ab cd"}))
    tokens = [*("<blank>", "<s>", "</s>"), "ab", "cd", "<unk>"]
    path = directory_of("sanm", weights=False, tokens=tokens, seg_dict="ab ab\ncd cd\n")
    processing = make_processing(path, data={"train": str(folder / "rows.jsonl")})
    (example,) = gathered(processing).examples
    assert processing.tokens.written(processing.encode(example, None).ids) == ["ab", "cd"]


def test_audio_that_is_too_short_for_its_text(make_processing, sanm, conformer, gathered, rows_of):
    """0.6 s are 58 frames of 25 ms: 10 after the low frame rate, one of them for the end mark, or 13 after two
    convolutions, where CTC needs one more between equal neighbours (你你: 7 + 6). A row that only CTC can't use stays,
    as the decoder learns from it; it is counted."""
    assert make_processing(sanm).frontend.frames(9600) == 10
    for path, text, fits, noted in (
        (sanm, "你好世界早上好天气"[:9], True, False),
        (sanm, "你好世界早上好天气今"[:10], False, False),
        (conformer, "你" * 7, True, False),
        (conformer, "你" * 8, True, True),
        (conformer, "你好世界早上好天气今天气早", True, False),
        (conformer, "你好世界早上好天气今天气早好", False, False),
    ):
        report = gathered(make_processing(path, data={"train": rows_of(text), "max_bad": 0.5})).report
        assert dict(report.dropped) == ({} if fits else {"too_short_for_its_text": 1}), text
        assert dict(report.noted) == ({"rows without a CTC loss, too short for it": 1} if noted else {}), text


def test_a_row_too_short_for_ctc_is_trained_as_by_funasr(make_task, conformer, rows_of, gathered, collated, auto_model):
    """It has no part in the mean of the CTC losses, and its full part in the rest. The decoder's loss is compared
    elsewhere: FunASR loses the last token of many rows."""
    task = make_task(conformer, data={"train": rows_of("你" * 8), "workers": 0}).eval()
    assert gathered(task.processing).report.noted
    batch = collated(task.processing, (0, 1, 2))
    model = auto_model(conformer).model.eval()
    task.paraformer.sampling_ratio = model.sampling_ratio = 0.0
    names = ("speech", "speech_lengths", "text", "text_lengths")
    _, stats, _ = model(**{name: batch[name].clone() for name in names})
    found = task.loss(batch)
    assert found.count == 3
    for name, key in (("ctc", "loss_ctc"), ("predictor", "loss_pre")):
        assert found.logs[name] / 3 == pytest.approx(stats[key].item(), rel=1e-5)
    parts = 0.3 * found.logs["ctc"] + 0.7 * found.logs["attention"] + found.logs["predictor"]
    assert float(found.sum) == pytest.approx(parts, rel=1e-5)


def test_a_text_of_nothing_is_refused_in_training_and_scored_in_evaluation(make_processing, sanm, gathered):
    """FunASR trains on it: an empty target still has a loss."""
    processing = make_processing(sanm, task={"kind": "asr.paraformer", "text": "normalized"})
    example = replace(gathered(processing).examples[0], text="?!")
    with pytest.raises(BadExample, match="no token is left"):
        processing.check(example, True)
    processing.check(example, False)
    assert processing.collate([processing.encode(example, None)], None)["text"].shape == (1, 0)


def test_too_little_audio_for_the_encoder(make_processing, conformer, gathered):
    """FunASR's encoder ends the training there with TooShortUttError."""
    processing = make_processing(conformer)
    example = replace(gathered(processing).examples[0], duration=0.08)
    with pytest.raises(BadExample, match="the encoder needs more audio"):
        processing.check(example, False)


# ---------------------------------------------------------------------------------------------- batches


def test_a_batch(make_processing, sanm, collated):
    processing = make_processing(sanm)
    batch = collated(processing, (0, 11))
    lengths = batch["speech_lengths"].tolist()
    assert lengths == [processing.frontend.frames(9600), processing.frontend.frames(27200)]
    assert batch["speech"].shape == (2, max(lengths), 560)
    assert not batch["speech"][0, lengths[0] :].any()
    assert batch["tokens"] == int(batch["text_lengths"].sum()) == 4 + 1
    assert (batch["text"] >= 0).sum() == 5
    shown = processing.show(batch, 0)
    assert [token for token, _ in shown.tokens] == list("你好世界")
    assert len(shown.picture.splitlines()) == 8


# ---------------------------------------------------------------------------------------------- new tokens


def test_characters_of_the_training_texts_are_appended(make_processing, sanm, gathered, rows_of):
    rows = rows_of("你好, 世界", "ab早")
    processing = make_processing(sanm, data={"train": rows}, model={"path": sanm, "new_tokens": "train"})
    before = make_processing(sanm).tokens.listed
    assert processing.tokens.listed == [*before, ",", "a", "b"]
    assert gathered(processing).report.kept_rows == 12
    given = make_processing(sanm, model={"path": sanm, "new_tokens": ["x", "好"]})
    assert given.tokens.listed == [*before, "x"]


@pytest.mark.parametrize(
    ("word", "pieces"),
    [("po'", "p@@ o@@ '"), ("è", "è"), ("b2b", "b 2 b"), ("你好", "你 好"), ("k歌", "k 歌"), ("2024", "2 0 2 4")],
)
def test_words_are_spelled_so_that_funasr_puts_them_together_again(word, pieces):
    from funasr.utils.postprocess_utils import sentence_postprocess

    assert " ".join(spell(word)) == pieces
    assert sentence_postprocess([*spell("ciao"), *spell(word)])[0].replace(" ", "") == f"ciao{word}"


def test_a_language_with_spaces_learns_its_words_letter_by_letter(directory_of, make_processing, gathered, rows_of):
    """Among them a word whose entry is in the dictionary while its token is not in the list."""
    from funasr.utils.postprocess_utils import sentence_postprocess

    path = directory_of("sanm", weights=False, tokens=["<blank>", "<s>", "</s>", "<unk>"], seg_dict="ciao ciao\n")
    texts = ("ciao", "cos'è un", "Perché no")
    sections = {"data": {"train": rows_of(*texts), "max_bad": 0.0}, "model": {"path": path, "new_tokens": "train"}}
    processing = make_processing(path, **sections)
    for example, text in zip(gathered(processing).examples, texts, strict=False):
        tokens = processing.tokens.written(processing.encode(example, None).ids)
        assert "<unk>" not in tokens
        assert sentence_postprocess(tokens)[0] == text.lower()
