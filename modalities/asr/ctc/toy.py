"""`python -m luthier.modalities.asr.ctc.toy [FOLDER]`: spoken commands and an untrained w2v-BERT, both made here,
for the recipe `asr/wav2vec2-ctc-toy`."""

from __future__ import annotations

import sys
from pathlib import Path

from ....common.errors import LuthierError
from ....common.once import made_once
from ..demo.speech import make_speech

FOLDER = "runs/wav2vec2-ctc-toy"  # what the shipped recipe names
VERSION = 1  # raised when the speech or the model is made in another way


def make_model(folder: str | Path, seed: int = 0) -> None:
    """Write a small w2v-BERT with random weights, without output layer and vocabulary, as a pretrained one comes.

    Args:
        folder: made if need be.
        seed: fixes the weights.
    """
    import torch
    from transformers import SeamlessM4TFeatureExtractor, Wav2Vec2BertConfig, Wav2Vec2BertModel

    config = Wav2Vec2BertConfig(
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=384,
        conv_depthwise_kernel_size=15,
        initializer_range=0.05,
        mask_time_prob=0.0,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        activation_dropout=0.1,
        conformer_conv_dropout=0.1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Wav2Vec2BertModel(config)
    model.save_pretrained(folder)
    SeamlessM4TFeatureExtractor(padding_value=1).save_pretrained(folder)


def prepare(folder: str | Path = FOLDER, seed: int = 0) -> bool:
    """Make `speech/{train,validation,test}.jsonl` and `model/` under the folder, once.

    Returns:
        whether anything was made.
    """
    root = Path(folder)

    def make() -> None:
        make_speech(root / "speech", seed)
        make_model(root / "model", seed)

    return made_once(root, {"version": VERSION, "seed": seed}, make)


if __name__ == "__main__":
    try:
        prepare(sys.argv[1] if len(sys.argv) > 1 else FOLDER)
    except LuthierError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
