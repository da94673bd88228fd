"""`python -m luthier.modalities.asr.paraformer.toy [FOLDER]`: spoken commands and an untrained Paraformer, both made on
the spot, for the recipe `asr/paraformer-toy`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import yaml

from ....common.errors import LuthierError
from ....common.once import made_once
from ..demo.speech import make_speech, sentences

FOLDER = "runs/paraformer-toy"  # what the shipped recipe names
VERSION = 1  # raised when the speech or the model is made in another way
WIDTH = 128

CONFIG = {
    "model": "Paraformer",
    "model_conf": {
        "ctc_weight": 0.0, "lsm_weight": 0.1, "length_normalized_loss": True, "predictor_weight": 1.0,
        "predictor_bias": 1, "sampling_ratio": 0.75,
    },
    "encoder": "SANMEncoder",
    "encoder_conf": {
        "output_size": WIDTH, "attention_heads": 4, "linear_units": 384, "num_blocks": 4, "dropout_rate": 0.1,
        "positional_dropout_rate": 0.1, "attention_dropout_rate": 0.1, "input_layer": "pe", "kernel_size": 11,
        "sanm_shfit": 0, "selfattention_layer_type": "sanm", "normalize_before": True,
    },
    "decoder": "ParaformerSANMDecoder",
    "decoder_conf": {
        "attention_heads": 4, "linear_units": 384, "num_blocks": 2, "att_layer_num": 2, "kernel_size": 11,
        "sanm_shfit": 0, "dropout_rate": 0.1, "positional_dropout_rate": 0.1, "self_attention_dropout_rate": 0.1,
        "src_attention_dropout_rate": 0.1,
    },
    "predictor": "CifPredictorV2",
    "predictor_conf": {"idim": WIDTH, "threshold": 1.0, "l_order": 1, "r_order": 1, "tail_threshold": 0.45},
    "frontend": "WavFrontend",
    "frontend_conf": {
        "fs": 16000, "window": "hamming", "n_mels": 80, "frame_length": 25, "frame_shift": 10, "lfr_m": 7, "lfr_n": 6,
    },
    "tokenizer": "CharTokenizer",
    "tokenizer_conf": {"unk_symbol": "<unk>", "split_with_space": True},
}  # fmt: skip
"""The parts and proportions of the released Paraformer, narrower."""


def make_model(folder: str | Path, texts: Iterable[str]) -> None:
    """Write a model directory without weights, whose tokens are the words of the texts.

    Args:
        folder: made if need be.
        texts: in lower case, with spaces between words.
    """
    root, words = Path(folder), sorted({word for text in texts for word in text.split()})
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.yaml").write_text(yaml.safe_dump(CONFIG, sort_keys=False), encoding="utf-8")
    (root / "tokens.json").write_text(json.dumps(["<blank>", "<s>", "</s>", *words, "<unk>"]), encoding="utf-8")
    (root / "seg_dict").write_text("".join(f"{word} {word}\n" for word in words), encoding="utf-8")


def prepare(folder: str | Path = FOLDER, seed: int = 0) -> bool:
    """Make `speech/{train,validation,test}.jsonl` and `model/` under the folder, once.

    Returns:
        whether anything was made.
    """
    root = Path(folder)

    def make() -> None:
        make_speech(root / "speech", seed)
        make_model(root / "model", sentences())

    return made_once(root, {"version": VERSION, "seed": seed}, make)


if __name__ == "__main__":
    try:
        prepare(sys.argv[1] if len(sys.argv) > 1 else FOLDER)
    except LuthierError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
