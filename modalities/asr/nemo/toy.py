"""`python -m luthier.modalities.asr.nemo.toy [FOLDER]`: spoken commands, made on the spot, and the configuration of a
small Conformer, for the recipe `asr/nemo-ctc-toy`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from ....common.errors import LuthierError
from ....common.once import made_once
from ..demo.speech import make_speech

FOLDER = "runs/nemo-ctc-toy"  # what the shipped recipe names
VERSION = 1  # raised when the speech or the model is made in another way
WIDTH = 96


def conformer_ctc(width: int = WIDTH, layers: int = 4, heads: int = 4, kernel: int = 15) -> dict[str, Any]:
    """NeMo's `conformer_ctc_char.yaml` at another size, with twice its frames, as some of the commands are spoken with
    more letters a second than it has frames; its labels are left to the training texts."""
    return {
        "target": "nemo.collections.asr.models.EncDecCTCModel",
        "sample_rate": 16000,
        "preprocessor": {
            "_target_": "nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor", "sample_rate": 16000,
            "normalize": "per_feature", "window_size": 0.025, "window_stride": 0.01, "window": "hann", "features": 80,
            "n_fft": 512, "log": True, "frame_splicing": 1, "dither": 1e-5, "pad_to": 0, "pad_value": 0.0,
        },
        "encoder": {
            "_target_": "nemo.collections.asr.modules.ConformerEncoder", "feat_in": 80, "feat_out": -1,
            "n_layers": layers, "d_model": width, "subsampling": "striding", "subsampling_factor": 2,
            "subsampling_conv_channels": -1, "ff_expansion_factor": 4, "self_attention_model": "rel_pos",
            "n_heads": heads, "att_context_size": [-1, -1], "xscaling": True, "untie_biases": True,
            "pos_emb_max_len": 5000, "conv_kernel_size": kernel, "conv_norm_type": "batch_norm", "dropout": 0.1,
            "dropout_pre_encoder": 0.1, "dropout_emb": 0.0, "dropout_att": 0.1,
        },
        "decoder": {
            "_target_": "nemo.collections.asr.modules.ConvASRDecoder", "feat_in": width, "num_classes": -1,
            "vocabulary": [],
        },
    }  # fmt: skip


def prepare(folder: str | Path = FOLDER, seed: int = 0) -> bool:
    """Make `speech/{train,validation,test}.jsonl` and `model.yaml` under the folder, once.

    Returns:
        whether anything was made.
    """
    root = Path(folder)

    def make() -> None:
        make_speech(root / "speech", seed)
        (root / "model.yaml").write_text(yaml.safe_dump(conformer_ctc(), sort_keys=False), encoding="utf-8")

    return made_once(root, {"version": VERSION, "seed": seed}, make)


if __name__ == "__main__":
    try:
        prepare(sys.argv[1] if len(sys.argv) > 1 else FOLDER)
    except LuthierError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
