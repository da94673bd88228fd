"""Tiny NeMo models, recordings of tones, and shortcuts to build what is tested.

Test files can't import from each other in pytest's importlib mode, so shared functions are fixtures.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile as sf
import torch
import yaml

RATE = 16000
TEXTS = (
    "hello world", "good day", "how are you", "one two", "see you", "a", "tre volte", "grazie", "ciao bella",
    "buona sera", "re", "two of two",
)  # fmt: skip
LABELS = sorted(set("".join(TEXTS)))
PACK = "nemo.collections.asr.modules"
STREAMED = {
    "causal_downsampling": True,
    "att_context_size": [[8, 1], [8, 0]],
    "att_context_style": "chunked_limited",
    "conv_context_size": "causal",
    "conv_norm_type": "layer_norm",
}


@pytest.fixture(autouse=True)
def _log_handlers(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """pytest's handler listens to NeMo's logger too, and NeMo sets the level of all handlers of that: it would stay."""
    yield
    caplog.handler.setLevel(logging.NOTSET)


def conformer(**changes: Any) -> dict[str, Any]:
    return {
        "_target_": f"{PACK}.ConformerEncoder", "feat_in": 40, "n_layers": 2, "d_model": 32, "n_heads": 2,
        "ff_expansion_factor": 2, "conv_kernel_size": 5, "subsampling_conv_channels": 8, "dropout": 0.1,
        "dropout_pre_encoder": 0.1, "dropout_emb": 0.0, "dropout_att": 0.1, **changes,
    }  # fmt: skip


def configuration(kind: str, labels: Sequence[str] | None = LABELS, **changes: Any) -> dict[str, Any]:
    """NeMo's configuration of a tiny model.

    Args:
        kind: `ctc`, `rnnt`, `tdt`, `hybrid` or `canary`; `streamed` is a cache-aware `ctc`.
        labels: None for a model of subwords, whose tokenizer the recipe names.
        changes: of the encoder.
    """
    extra = {"tdt": 3}.get(kind, 0)
    head = {"_target_": f"{PACK}.ConvASRDecoder", "feat_in": None, "num_classes": -1, "vocabulary": labels}
    mel = {
        "_target_": f"{PACK}.AudioToMelSpectrogramPreprocessor", "sample_rate": RATE, "features": 40, "n_fft": 512,
        "window_size": 0.025, "window_stride": 0.01, "dither": 1e-5, "pad_to": 0,
        "normalize": "NA" if kind == "streamed" else "per_feature",
    }  # fmt: skip
    encoder = conformer(**(STREAMED if kind == "streamed" else {}) | changes)
    tree: dict[str, Any] = {"sample_rate": RATE, "preprocessor": mel, "encoder": encoder}
    if labels is None:
        tree["tokenizer"] = {"dir": "unset", "type": "bpe"}
    else:
        tree["labels"] = list(labels)
    if kind in ("ctc", "streamed"):
        return {**tree, "decoder": head}
    if kind == "canary":
        return {**tree, **canary()}
    if kind == "hybrid":
        tree["aux_ctc"] = {"ctc_loss_weight": 0.3, "decoder": head}
    return {
        **tree,
        "model_defaults": {"enc_hidden": 32, "pred_hidden": 24},
        "decoder": {
            "_target_": f"{PACK}.RNNTDecoder", "blank_as_pad": True,
            "prednet": {"pred_hidden": 24, "pred_rnn_layers": 1},
        },
        "joint": {
            "_target_": f"{PACK}.RNNTJoint", "num_extra_outputs": extra,
            "jointnet": {"joint_hidden": 24, "activation": "relu", "dropout": 0.0},
        },
        "decoding": {
            "strategy": "greedy_batch", "greedy": {"max_symbols": 5}, "durations": [],
            "model_type": "tdt" if extra else "rnnt",
        },
        "loss": {"loss_name": "tdt", "tdt_kwargs": {"durations": [0, 1, 2], "sigma": 0.02}}
        if kind == "tdt" else {"loss_name": "default"},
    }  # fmt: skip


def canary() -> dict[str, Any]:
    """What such a model has besides its encoder: a projection, an encoder of its own, a decoder, a loss, prompts."""
    layers = {
        "num_layers": 1, "hidden_size": 24, "inner_size": 48, "num_attention_heads": 2, "ffn_dropout": 0.1,
        "attn_score_dropout": 0.1, "attn_layer_dropout": 0.1, "pre_ln": True,
    }  # fmt: skip
    words = {**layers, "max_sequence_length": 64, "embedding_dropout": 0.1}
    transformer = "nemo.collections.asr.modules.transformer"
    return {
        "prompt_format": "canary",
        "model_defaults": {"asr_enc_hidden": 32, "lm_enc_hidden": 24, "lm_dec_hidden": 24},
        "transf_encoder": {"_target_": f"{transformer}.transformer_encoders.TransformerEncoder", **layers},
        "transf_decoder": {
            "_target_": f"{transformer}.get_nemo_transformer", "model_name": None, "pretrained": False,
            "encoder": False, "pre_ln_final_layer_norm": True, "config_dict": words,
        },
        "head": {
            "_target_": "nemo.collections.asr.parts.submodules.token_classifier.TokenClassifier", "num_layers": 1,
            "activation": "relu", "log_softmax": True, "hidden_size": 24, "num_classes": None, "dropout": 0.0,
            "use_transformer_init": True,
        },
        "loss": {
            "_target_": "nemo.collections.common.losses.smoothed_cross_entropy.SmoothedCrossEntropyLoss",
            "label_smoothing": 0.1, "pad_id": None,
        },
        "decoding": {"strategy": "beam", "beam": {"beam_size": 1, "len_pen": 0.0, "max_generation_delta": 20}},
    }  # fmt: skip


@pytest.fixture(scope="session")
def config_of(tmp_path_factory) -> Callable[..., str]:
    """`config_of(kind, labels, **encoder)`: the YAML file of such a model."""
    folder = tmp_path_factory.mktemp("configurations")

    def make(kind: str, labels: Sequence[str] | None = LABELS, **changes: Any) -> str:
        tree = configuration(kind, labels, **changes)
        file = folder / f"{kind}-{len(list(folder.iterdir()))}.yaml"
        file.write_text(yaml.safe_dump(tree), encoding="utf-8")
        return str(file)

    return make


@pytest.fixture(scope="session")
def pieces(tmp_path_factory) -> str:
    """A SentencePiece model of the texts."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("pieces")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_prefix=str(folder / "tokenizer"), vocab_size=30, model_type="bpe",
        bos_id=-1, eos_id=-1, minloglevel=2,
    )  # fmt: skip
    return str(folder / "tokenizer.model")


@pytest.fixture(scope="session")
def languages(pieces, tmp_path_factory) -> dict[str, Any]:
    """The tokenizer of a Canary model of two languages, with the control tokens of both and `<|fr|>`."""
    from nemo.collections.common.tokenizers.canary_tokenizer import CanaryTokenizer

    special = tmp_path_factory.mktemp("special")
    CanaryTokenizer.build_special_tokenizer(["en", "it", "fr", "transcribe", "translate"], special)
    folder = tmp_path_factory.mktemp("nemo-pieces")
    (folder / "tokenizer.model").write_bytes(Path(pieces).read_bytes())
    (folder / "vocab.txt").write_text("unused\n")
    folders = {"spl_tokens": special, "en": folder, "it": folder}
    return {
        "dir": None, "type": "agg",
        "langs": {name: {"dir": str(one), "type": "bpe"} for name, one in folders.items()},
        "custom_tokenizer": {
            "_target_": "nemo.collections.common.tokenizers.canary_tokenizer.CanaryTokenizer", "tokenizers": None,
        },
    }  # fmt: skip


@pytest.fixture(scope="session")
def canary_config(languages, tmp_path_factory) -> str:
    """The YAML file of a Canary model with these tokenizers."""
    tree = {**configuration("canary"), "tokenizer": languages}
    file = tmp_path_factory.mktemp("canary") / "model.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return str(file)


@pytest.fixture(scope="session")
def saved_of(config_of, pieces, languages, tmp_path_factory) -> Callable[..., str]:
    """`saved_of(kind, subwords)`: a `.nemo` file of such a model, written by NeMo alone."""
    made: dict[tuple[str, bool], str] = {}

    def make(kind: str, subwords: bool = False) -> str:
        if (kind, subwords) not in made:
            import nemo.collections.asr as nemo_asr
            from nemo.utils.app_state import AppState
            from omegaconf import OmegaConf

            AppState()._all_model_restore_paths.clear()  # else NeMo's Canary looks into the file restored last
            tree = configuration(kind, None if subwords else LABELS)
            names = {"ctc": "CTC", "streamed": "CTC", "rnnt": "RNNT", "tdt": "RNNT", "hybrid": "HybridRNNTCTC"}
            name = "EncDecMultiTaskModel" if kind == "canary" else f"EncDec{names[kind]}Model"
            if kind == "canary":
                tree["tokenizer"] = languages
            elif subwords:
                folder = tmp_path_factory.mktemp("nemo-pieces")
                (folder / "tokenizer.model").write_bytes(Path(pieces).read_bytes())
                (folder / "vocab.txt").write_text("unused\n")
                tree["tokenizer"]["dir"] = str(folder)
                name = name.replace("Model", "BPEModel") if "RNNT" in name else f"{name}BPE"
                tree["validation_ds"] = {"defer_setup": True}
            torch.manual_seed(1)
            file = tmp_path_factory.mktemp("nemo") / f"{kind}.nemo"
            getattr(nemo_asr.models, name)(cfg=OmegaConf.create(tree)).save_to(str(file))
            made[kind, subwords] = str(file)
        return made[kind, subwords]

    return make


# ---------------------------------------------------------------------------------------------- recordings


def tones(text: str) -> np.ndarray:
    """A tone of its own pitch for each letter, 0.12 s each, with a little noise; mono float32 at 16 kHz."""
    generator, clock = np.random.default_rng(len(text)), np.arange(int(0.12 * RATE)) / RATE
    parts = [0.2 * np.sin(2 * np.pi * (200 + 140 * LABELS.index(letter)) * clock) for letter in text]
    wave = np.concatenate(parts)
    return (wave + 0.003 * generator.standard_normal(len(wave))).astype(np.float32)


@pytest.fixture(scope="session")
def manifest(write_manifest, tmp_path_factory) -> Path:
    """A manifest of 12 recordings of 0.12 to 1.3 s."""
    rows = [{"text": text, "speaker": "ab"[at % 2]} for at, text in enumerate(TEXTS)]
    return write_manifest(tmp_path_factory.mktemp("tones"), [tones(text) for text in TEXTS], rows)


@pytest.fixture(scope="session")
def make_recipe(recipes, manifest, tmp_path_factory) -> Callable[..., Any]:
    """`make_recipe(path, **sections)`: see `recipes`."""
    return recipes(manifest, tmp_path_factory.mktemp("output"), {"kind": "asr.nemo", "language": "en"})


@pytest.fixture(scope="session")
def make_task(make_recipe) -> Callable[..., Any]:
    """`make_task(path, weights=None, **sections)`: the task of such a recipe."""
    from luthier.modalities.asr.nemo.task import Task

    def make(path: str, /, weights: Path | None = None, **sections: Any) -> Task:
        torch.manual_seed(0)
        return Task(make_recipe(path, **sections), weights)

    return make


@pytest.fixture(scope="session")
def collated(collator) -> Callable[..., dict[str, Any]]:
    """`collated(processing, indices, generator)`: see `collator`."""
    return collator((0, 1, 2, 6))


@pytest.fixture(scope="session")
def wave_batch(manifest) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """`wave_batch(indices)`: those recordings as NeMo's loader batches them, and their lengths."""

    def make(indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        waves = [torch.from_numpy(sf.read(manifest.parent / f"{i}.wav", dtype="float32")[0]) for i in indices]
        lengths = torch.tensor([len(wave) for wave in waves])
        return torch.nn.utils.rnn.pad_sequence(waves, batch_first=True), lengths

    return make
