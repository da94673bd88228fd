"""Augmentation: the same draw gives the same audio, and each change has the strength that was asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
import torch
from pydantic import ValidationError

from luthier.common.errors import DataError
from luthier.modalities.asr.augment import Augment, add_noise, change_speed, reverberate
from luthier.modalities.asr.sections import AugmentSection

RATE = 16000


def noise(samples: int, seed: int = 0, level: float = 0.05) -> np.ndarray:
    return (level * np.random.default_rng(seed).standard_normal(samples)).astype(np.float32)


def tone(samples: int, hertz: float = 1000.0) -> np.ndarray:
    return (0.3 * np.sin(2 * np.pi * hertz * np.arange(samples) / RATE)).astype(np.float32)


def power(samples: np.ndarray) -> float:
    return float(np.mean(samples.astype(np.float64) ** 2))


def draw(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed or (0,))


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    for folder, seconds in (("noise", 3.0), ("noise/more", 0.2), ("room", 0.1)):
        (tmp_path / folder).mkdir()
        sf.write(tmp_path / folder / "x.wav", noise(round(seconds * 44100), len(folder)), 44100)
    (tmp_path / "noise" / "notes.txt").write_text("no audio")
    return {"noise_folder": str(tmp_path / "noise"), "reverb_folder": str(tmp_path / "room")}


def everything(folders: dict[str, str]) -> Augment:
    section = AugmentSection(
        speed=(0.9, 1.0, 1.1), gain_db=(-6, 6), noise_snr_db=(5, 20), noise_probability=0.7, reverb_probability=0.5,
        time_masks=2, time_mask_max=0.2, frequency_masks=2, frequency_mask_max=10, **folders,
    )  # fmt: skip
    return Augment(section, RATE)


def test_off_by_default():
    augment = Augment(AugmentSection(), RATE)
    samples, mel = tone(1600), torch.rand(80, 10)
    assert augment.wave(samples, draw()) is samples
    assert augment.features(mel, draw()) is mel
    assert not augment.changes_wave
    assert not augment.changes_features
    assert augment.max_speed_stretch == 1.0


def test_the_same_seed_gives_the_same_example(folders):
    samples, mel = tone(8000), torch.rand(80, 100)
    waves, mels = [], []
    for index in range(8):
        once, again = (everything(folders).wave(samples, draw(1, 2, index)) for _ in range(2))
        np.testing.assert_array_equal(once, again)
        assert once.dtype == np.float32
        waves.append(once.tobytes())
        once, again = (everything(folders).features(mel, draw(1, 2, index)) for _ in range(2))
        assert torch.equal(once, again)
        mels.append(once.numpy().tobytes())
    assert len(set(waves)) == len(set(mels)) == 8
    np.testing.assert_array_equal(samples, tone(8000))


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.1, 2.0])
def test_speed_changes_duration_and_pitch(factor):
    fast = change_speed(tone(RATE), RATE, factor)
    assert len(fast) == round(RATE / factor)
    spectrum = np.abs(np.fft.rfft(fast * np.hanning(len(fast))))
    assert np.fft.rfftfreq(len(fast), 1 / RATE)[spectrum.argmax()] == pytest.approx(1000 * factor, abs=2)


def test_speeds_that_would_not_fit_are_not_drawn():
    augment = Augment(AugmentSection(speed=(0.8, 1.0, 1.25)), RATE)
    assert augment.max_speed_stretch == 1.25
    lengths = {len(augment.wave(tone(1000), draw(seed), 1249)) for seed in range(40)}
    assert lengths == {1000, 800}
    lengths = {len(augment.wave(tone(1000), draw(seed), 1250)) for seed in range(40)}
    assert lengths == {1000, 800, 1250}
    slow = Augment(AugmentSection(speed=(0.8,)), RATE)
    assert len(slow.wave(tone(1000), draw(), 1100)) == 1000


@pytest.mark.parametrize("snr", [-5.0, 0.0, 20.0])
def test_noise_reaches_its_snr(snr):
    speech = tone(RATE)
    noisy = add_noise(speech, noise(RATE), snr)
    assert 10 * np.log10(power(speech) / power(noisy - speech)) == pytest.approx(snr, abs=0.01)


def test_noise_from_files_reaches_its_snr(folders):
    """Also where the file is shorter than the audio and repeats, at another rate, or is only cut out of."""
    section = AugmentSection(noise_folder=folders["noise_folder"], noise_snr_db=(10, 10), noise_probability=1)
    augment, speech, added = Augment(section, RATE), tone(RATE), set()
    for seed in range(12):
        rest = augment.wave(speech, draw(seed)) - speech
        assert 10 * np.log10(power(speech) / power(rest)) == pytest.approx(10, abs=0.01)
        added.add(rest.tobytes())
    assert len(added) == 12


def test_probability_is_a_share(folders):
    section = AugmentSection(noise_folder=folders["noise_folder"], noise_snr_db=(10, 10), noise_probability=0.3)
    augment, speech = Augment(section, RATE), tone(400)
    changed = sum(not np.array_equal(augment.wave(speech, draw(seed)), speech) for seed in range(300))
    # Binomial: 90 expected, standard deviation 7.9.
    assert 60 < changed < 120


def test_silence_has_no_snr():
    silence = np.zeros(100, np.float32)
    np.testing.assert_array_equal(add_noise(silence, noise(100), 10), silence)
    np.testing.assert_array_equal(add_noise(tone(100), silence, 10), tone(100))
    np.testing.assert_array_equal(reverberate(tone(100), silence), tone(100))


def test_a_room_keeps_time_and_power():
    speech = noise(4000)
    response = np.zeros(600, np.float32)
    response[[100, 300, 599]] = 1.0, -0.5, 0.25
    echoed = reverberate(speech, response)
    assert echoed.shape == speech.shape
    assert echoed.dtype == np.float32
    assert power(echoed) == pytest.approx(power(speech), rel=1e-5)
    # The direct sound is at 100, so the echoes come 200 and 499 samples later.
    expected = speech.astype(np.float64)
    expected[200:] += -0.5 * speech[:-200]
    expected[499:] += 0.25 * speech[:-499]
    expected *= np.sqrt(power(speech) / power(expected))
    np.testing.assert_allclose(echoed, expected, atol=1e-6)


def test_a_room_of_one_impulse_changes_nothing():
    np.testing.assert_allclose(reverberate(tone(500), np.array([0, 3, 0], np.float32)), tone(500), atol=1e-6)


def test_gain_and_peak():
    quiet = Augment(AugmentSection(gain_db=(-6, -6)), RATE).wave(tone(1000), draw())
    np.testing.assert_allclose(quiet, tone(1000) * 10 ** (-6 / 20), rtol=1e-6)
    loud = Augment(AugmentSection(gain_db=(40, 40)), RATE).wave(tone(1000), draw())
    assert np.abs(loud).max() == pytest.approx(1.0)
    np.testing.assert_allclose(loud, tone(1000) / np.abs(tone(1000)).max(), atol=1e-6)


def test_time_masks_keep_to_their_share_and_hold_the_mean():
    augment = Augment(AugmentSection(time_masks=2, time_mask_max=0.1), RATE)
    mel, widths = torch.rand(80, 50), set()
    for seed in range(60):
        masked = augment.features(mel, draw(seed))
        columns = (masked != mel).all(0)
        assert torch.equal(masked[:, ~columns], mel[:, ~columns])
        assert (masked[:, columns] == mel.mean()).all()
        widths.add(int(columns.sum()))
    assert min(widths) == 0
    assert max(widths) == 10  # two masks of a tenth of 50 frames
    assert torch.equal(augment.features(mel[:, :9], draw(1)), mel[:, :9])  # a tenth of 9 frames is less than one


def test_frequency_masks():
    augment = Augment(AugmentSection(frequency_masks=1, frequency_mask_max=200), RATE)
    mel = torch.rand(80, 50)
    widths = {int((augment.features(mel, draw(seed)) != mel).all(1).sum()) for seed in range(400)}
    assert max(widths) == 80
    assert min(widths) == 0


def test_sections_refuse_what_could_not_act(folders, tmp_path):
    noise_folder, room = folders["noise_folder"], folders["reverb_folder"]
    for wrong in (
        {"noise_snr_db": (5, 10)},
        {"noise_folder": noise_folder},
        {"noise_folder": noise_folder, "noise_snr_db": (5, 10)},
        {"noise_folder": noise_folder, "noise_snr_db": (10, 5), "noise_probability": 1},
        {"noise_folder": str(tmp_path / "absent"), "noise_snr_db": (5, 10), "noise_probability": 1},
        {"reverb_folder": room},
        {"reverb_probability": 0.5},
        {"reverb_probability": 1.5, "reverb_folder": room},
        {"gain_db": (3, -3)},
        {"speed": (0.0,)},
        {"speed": (-1.0, 1.0)},
        {"time_masks": 3, "time_mask_max": 0.5},
        {"frequency_mask_max": 0},
    ):
        with pytest.raises(ValidationError):
            AugmentSection(**wrong)
    section = AugmentSection(noise_folder=noise_folder, noise_snr_db=(5, 10), noise_probability=1)
    assert AugmentSection.model_validate(section.model_dump()) == section


def test_a_folder_without_audio(tmp_path):
    (tmp_path / "readme.txt").write_text("nothing here")
    with pytest.raises(DataError, match="no audio files"):
        Augment(AugmentSection(reverb_folder=str(tmp_path), reverb_probability=1), RATE)
