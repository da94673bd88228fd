"""Tiny FunASR directories, made by FunASR itself, recordings of tones, and shortcuts to build what is tested."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from luthier.common.data.collect import collect

pytest.importorskip("funasr")

RATE = 16000
MARKS = ("<blank>", "<s>", "</s>")
TEXTS = (
    "你好世界",
    "早上好",
    "今天天气",
    "再见朋友",
    "你好",
    "天气好",
    "世界",
    "朋友再见",
    "上天",
    "早",
    "今天好",
    "见",
)

SANM = {
    "model": "Paraformer",
    "model_conf": {
        "ctc_weight": 0.0, "lsm_weight": 0.1, "length_normalized_loss": True, "predictor_weight": 1.0,
        "predictor_bias": 1, "sampling_ratio": 0.75,
    },
    "encoder": "SANMEncoder",
    "encoder_conf": {
        "output_size": 32, "attention_heads": 2, "linear_units": 64, "num_blocks": 2, "dropout_rate": 0.1,
        "input_layer": "pe", "kernel_size": 5, "selfattention_layer_type": "sanm",
    },
    "decoder": "ParaformerSANMDecoder",
    "decoder_conf": {
        "attention_heads": 2, "linear_units": 64, "num_blocks": 2, "att_layer_num": 2, "kernel_size": 5,
        "dropout_rate": 0.1,
    },
    "predictor": "CifPredictorV2",
    "predictor_conf": {"idim": 32, "threshold": 1.0, "l_order": 1, "r_order": 1, "tail_threshold": 0.45},
    "frontend": "WavFrontend",
    "frontend_conf": {
        "fs": RATE, "window": "hamming", "n_mels": 80, "frame_length": 25, "frame_shift": 10, "lfr_m": 7, "lfr_n": 6,
    },
    "tokenizer": "CharTokenizer",
    "tokenizer_conf": {"unk_symbol": "<unk>", "split_with_space": True},
}  # fmt: skip
"""As the released Paraformer is made, tiny."""

CONFORMER = {
    "model": "Paraformer",
    "model_conf": {
        "ctc_weight": 0.3, "lsm_weight": 0.1, "length_normalized_loss": False, "predictor_weight": 1.0,
        "sampling_ratio": 0.4,
    },
    "encoder": "ConformerEncoder",
    "encoder_conf": {
        "output_size": 32, "attention_heads": 2, "linear_units": 64, "num_blocks": 2, "dropout_rate": 0.1,
        "attention_dropout_rate": 0.0, "input_layer": "conv2d", "normalize_before": True,
        "pos_enc_layer_type": "rel_pos", "selfattention_layer_type": "rel_selfattn", "activation_type": "swish",
        "macaron_style": True, "use_cnn_module": True, "cnn_module_kernel": 5,
    },
    "decoder": "ParaformerSANDecoder",
    "decoder_conf": {"attention_heads": 2, "linear_units": 64, "num_blocks": 2, "dropout_rate": 0.1},
    "predictor": "CifPredictor",
    "predictor_conf": {"idim": 32, "threshold": 1.0, "l_order": 1, "r_order": 1, "tail_threshold": 0.45},
    "frontend": "WavFrontend",
    "frontend_conf": {"fs": RATE, "window": "hamming", "n_mels": 80, "frame_length": 25, "frame_shift": 10},
    "specaug": "SpecAug",
    "specaug_conf": {
        "apply_time_warp": False, "apply_freq_mask": True, "freq_mask_width_range": [0, 30], "num_freq_mask": 2,
        "apply_time_mask": True, "time_mask_width_range": [0, 8], "num_time_mask": 2,
    },
    "tokenizer": "CharTokenizer",
    "tokenizer_conf": {"unk_symbol": "<unk>", "split_with_space": True},
    "ctc_conf": {"dropout_rate": 0.0, "ctc_type": "builtin", "reduce": True, "ignore_nan_grad": True},
}  # fmt: skip
"""As FunASR's recipes train it from nothing, tiny."""

CONFIGS = {"sanm": SANM, "conformer": CONFORMER}


def merged(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Sections of the changes go into those of the configuration; a value of None takes a key away."""
    found = deepcopy(config)
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(found.get(name), dict):
            found[name] = merged(found[name], value)
        else:
            found[name] = value
    return {name: value for name, value in found.items() if value is not None}


def kaldi_cmvn(size: int) -> str:
    """A Kaldi file of shifts and scales of `size` features."""
    generator = np.random.default_rng(0)
    shift, scale = -10 + generator.standard_normal(size), 0.2 + 0.05 * generator.random(size)
    parts = [f"<AddShift> {size} {size}", f"<LearnRateCoef> 0 [ {' '.join(map(str, shift))} ]",
             f"<Rescale> {size} {size}", f"<LearnRateCoef> 0 [ {' '.join(map(str, scale))} ]"]  # fmt: skip
    return "\n".join(["<Nnet>", *parts, "</Nnet>", ""])


@pytest.fixture
def _randomness():
    """The random generators as they were, after a test that lets FunASR seed them."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@pytest.fixture(scope="session")
def auto_model() -> Callable[..., Any]:
    """`auto_model(folder)`: FunASR's own AutoModel of a directory, or of a configuration given by keywords."""
    from funasr import AutoModel

    def make(model: str | Path | None = None, **more: Any) -> Any:
        given = {"model": str(model)} if model is not None else {}
        return AutoModel(**given, **more, device="cpu", ncpu=1, disable_update=True, disable_pbar=True)

    return make


@pytest.fixture(scope="session")
def directory_of(tmp_path_factory, auto_model) -> Callable[..., str]:
    """`directory_of(name, **changes)`: a directory with the random weights that FunASR makes; see `merged`.

    weights: whether `model.pt` is written; texts: those of the token list; seg_dict: lines of that file.
    """

    def make(
        name: str = "sanm", /, weights: bool = True, texts: Sequence[str] = TEXTS, seg_dict: str = "",
        tokens: Sequence[str] | None = None, **changes: Any,
    ) -> str:  # fmt: skip
        folder = tmp_path_factory.mktemp(name)
        config = merged(CONFIGS[name], changes)
        listed = [*MARKS, *sorted(set("".join(texts)) - {" "}), "<unk>"] if tokens is None else list(tokens)
        (folder / "config.yaml").write_text(yaml.safe_dump(config, allow_unicode=True), encoding="utf-8")
        (folder / "tokens.json").write_text(json.dumps(listed, ensure_ascii=False), encoding="utf-8")
        if seg_dict:
            (folder / "seg_dict").write_text(seg_dict, encoding="utf-8")
        if name == "sanm":
            (folder / "am.mvn").write_text(kaldi_cmvn(560), encoding="utf-8")
        if weights:
            given = merged(config, {"tokenizer_conf": {"token_list": listed}})
            torch.save(auto_model(**given, seed=7).model.state_dict(), folder / "model.pt")
        return str(folder)

    return make


@pytest.fixture(scope="session")
def sanm(directory_of) -> str:
    return directory_of("sanm")


@pytest.fixture(scope="session")
def conformer(directory_of) -> str:
    return directory_of("conformer")


# ---------------------------------------------------------------------------------------------- recordings


def recording(number: int, seconds: float) -> np.ndarray:
    """A sequence of tones with a little noise, mono float32 at 16 kHz."""
    generator = np.random.default_rng(number)
    clock = np.arange(round(seconds * RATE)) / RATE
    pitch = 300 + 200 * number + 100 * np.floor(clock * 4)
    wave = 0.2 * np.sin(2 * np.pi * pitch * clock) + 0.003 * generator.standard_normal(len(clock))
    return wave.astype(np.float32)


@pytest.fixture(scope="session")
def tones() -> Callable[[int, float], np.ndarray]:
    """`tones(number, seconds)`: see `recording`."""
    return recording


@pytest.fixture(scope="session")
def manifest(write_manifest, tmp_path_factory) -> Path:
    """A manifest of 12 recordings of 0.6 to 1.7 s."""
    rows = [{"text": text, "language": "zh"} for text in TEXTS]
    waves = [recording(at, 0.6 + 0.1 * at) for at in range(len(TEXTS))]
    return write_manifest(tmp_path_factory.mktemp("tones"), waves, rows, subtype="PCM_16")


@pytest.fixture(scope="session")
def rows_of(manifest, tmp_path_factory) -> Callable[..., str]:
    """`rows_of(*texts)`: the manifest with its first rows' texts replaced."""

    def make(*texts: str) -> str:
        lines = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()]
        for line, text in zip(lines, texts, strict=False):
            line["text"] = text
        for line in lines:
            line["audio"] = str(manifest.parent / line["audio"])
        file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
        file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
        return str(file)

    return make


@pytest.fixture(scope="session")
def make_recipe(recipes, manifest, tmp_path_factory) -> Callable[..., Any]:
    """`make_recipe(path, **sections)`: see `recipes`."""
    return recipes(manifest, tmp_path_factory.mktemp("output"), {"kind": "asr.paraformer"})


@pytest.fixture(scope="session")
def make_processing(make_recipe) -> Callable[..., Any]:
    """`make_processing(path, **sections)`: the data path of such a recipe."""
    from luthier.modalities.asr.paraformer.task import Task

    return lambda path, /, **sections: Task.make_processing(make_recipe(path, **sections))


@pytest.fixture(scope="session")
def make_task(make_recipe) -> Callable[..., Any]:
    """`make_task(path, weights=None, **sections)`: the task of such a recipe."""
    from luthier.modalities.asr.paraformer.task import Task

    return lambda path, /, weights=None, **sections: Task(make_recipe(path, **sections), weights)


@pytest.fixture(scope="session")
def gathered() -> Callable[[Any], Any]:
    """`gathered(processing)`: checked examples and the report of its training data."""
    return lambda processing: collect(processing.recipe.data.train, processing, processing.recipe.data)


@pytest.fixture(scope="session")
def collated(collator) -> Callable[..., dict[str, Any]]:
    """`collated(processing, indices, generator)`: see `collator`."""
    return collator((0, 1, 2, 11))


@pytest.fixture
def whole_seed(monkeypatch) -> Callable[[Callable[[], Any]], int]:
    """`whole_seed(run)`: the first seed with which FunASR's loop finds all tokens; rounding loses the last one of many
    rows, which becomes 0."""
    from funasr.models.paraformer import cif_predictor

    def whole(run: Callable[[], Any], seed: int) -> bool:
        found = []

        def watched(name: str) -> Any:
            original = getattr(cif_predictor, name)

            def watch(hidden: torch.Tensor, weights: torch.Tensor, threshold: float) -> Any:
                tokens, peaks = original(hidden, weights, threshold)
                last = weights.sum(1).round().long() - 1
                found.append(bool(tokens[torch.arange(len(tokens)), last].any(-1).all()))
                return tokens, peaks

            return watch

        with monkeypatch.context() as patch, torch.no_grad():
            for name in ("cif", "cif_v1"):
                patch.setattr(cif_predictor, name, watched(name))
            torch.manual_seed(seed)
            run()
        return found == [True]

    return lambda run: next(seed for seed in range(200) if whole(run, seed))
