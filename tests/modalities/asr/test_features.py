"""Features over the real audio, padded, are those of transformers' WhisperFeatureExtractor."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor

from luthier.common.errors import ModelError
from luthier.modalities.asr.features import LogMel

TINY = [1, 2, 39, 40, 41, 159, 160, 161, 199, 200, 201, 202, 361, 400]
SHORT = [16000, 16001, 16159, 40000]
# 30 s are 480000 samples; the last frame begins 40 samples before its end is reached, then mirrors them.
FULL = [479700, 479799, 479800, 479839, 479840, 479841, 479958, 479960, 479999, 480000]


def clip(samples: int, seed: int = 0) -> np.ndarray:
    return (0.1 * np.random.default_rng(seed).standard_normal(samples)).astype(np.float32)


def reference(extractor: WhisperFeatureExtractor, *waves: np.ndarray) -> torch.Tensor:
    return extractor(list(waves), sampling_rate=16000, return_tensors="pt").input_features


@pytest.mark.parametrize("bins", [80, 128])
@pytest.mark.parametrize("samples", TINY + SHORT + FULL)
def test_padded_equals_the_extractor(bins, samples):
    extractor = WhisperFeatureExtractor(feature_size=bins)
    features, wave = LogMel.from_extractor(extractor), clip(samples)
    mel = features(wave)
    assert mel.dtype == torch.float32
    assert mel.shape == (bins, features.frames(samples))
    assert math.ceil(samples / 160) <= mel.shape[1] <= min(math.ceil(samples / 160) + 2, 3000)
    torch.testing.assert_close(features.pad([mel], 3000), reference(extractor, wave), atol=1e-6, rtol=0)


def test_a_batch_equals_the_extractor():
    extractor = WhisperFeatureExtractor(feature_size=128)
    features = LogMel.from_extractor(extractor)
    waves = [clip(7777), 0.001 * clip(50000, 1), np.zeros(8000, np.float32), np.r_[clip(16000), np.zeros(16000, "f4")]]
    mels = [features(wave) for wave in waves]
    expected = reference(extractor, *waves)
    torch.testing.assert_close(features.pad(mels, 3000), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(features.pad(mels, 400), expected[..., :400], atol=1e-6, rtol=0)
    # Silence reaches the floor 1e-10 everywhere: (-10 + 4) / 4.
    assert features.pad_value(mels[2]) == -1.5


def test_other_settings_equal_the_extractor():
    extractor = WhisperFeatureExtractor(feature_size=40, hop_length=100, chunk_length=2, n_fft=512)
    features = LogMel.from_extractor(extractor)
    for samples in (1, 99, 100, 256, 257, 5000, 31700, 31900, 31999, 32000):
        expected = reference(extractor, clip(samples))
        torch.testing.assert_close(features.pad([features(clip(samples))], 320), expected, atol=1e-6, rtol=0)


def test_the_numpy_path_agrees():
    extractor = WhisperFeatureExtractor()
    features, wave = LogMel.from_extractor(extractor), clip(16000)
    padded = np.zeros((1, 480000), np.float32)
    padded[0, :16000] = wave
    expected = torch.from_numpy(extractor._np_extract_fbank_features(padded, "cpu"))
    torch.testing.assert_close(features.pad([features(wave)], 3000), expected.float(), atol=1e-5, rtol=0)


def test_pad_values_may_come_from_before_masking():
    features = LogMel.from_extractor(WhisperFeatureExtractor())
    mel = features(clip(1600))
    value = features.pad_value(mel)
    masked = torch.zeros_like(mel)
    assert features.pad([masked], 20, [value])[0, 0, -1] == pytest.approx(value)


def test_nothing_is_cut():
    features = LogMel.from_extractor(WhisperFeatureExtractor())
    with pytest.raises(ValueError, match="480000"):
        features(clip(480001))
    with pytest.raises(ValueError, match="mono"):
        features(np.zeros((2, 1000), np.float32))
    with pytest.raises(ValueError, match="102 frames"):
        features.pad([features(clip(16000))], 101)


def test_dither_is_refused():
    with pytest.raises(ModelError, match="dither"):
        LogMel.from_extractor(WhisperFeatureExtractor(dither=1e-4))


def test_settings_tell_features_apart_and_workers_get_a_copy():
    small, large = (LogMel.from_extractor(WhisperFeatureExtractor(feature_size=bins)) for bins in (80, 128))
    assert small.settings != large.settings
    copy = pickle.loads(pickle.dumps(small))
    assert copy.settings == small.settings
    assert torch.equal(copy(clip(1000)), small(clip(1000)))
