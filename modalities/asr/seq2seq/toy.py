"""`python -m luthier.modalities.asr.seq2seq.toy [FOLDER]`: spoken commands and an untrained Moonshine, both made here,
for the recipe `asr/moonshine-toy`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from ....common.errors import LuthierError
from ....common.once import made_once
from ..demo.speech import make_speech, sentences

FOLDER = "runs/moonshine-toy"  # what the shipped recipe names
VERSION = 1  # raised when the speech or the model is made in another way
SPECIAL = ("<unk>", "<s>", "</s>")


def make_model(folder: str | Path, texts: Iterable[str], seed: int = 0) -> None:
    """Write a small Moonshine with random weights, whose tokens are the words of the texts.

    Args:
        folder: made if need be.
        texts: with spaces between words.
        seed: fixes the weights.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        MoonshineConfig,
        MoonshineForConditionalGeneration,
        PreTrainedTokenizerFast,
        Wav2Vec2FeatureExtractor,
        Wav2Vec2Processor,
    )

    words = [*SPECIAL, *sorted({word for text in texts for word in text.split()})]
    listed = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token=SPECIAL[0]))
    listed.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=listed, unk_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2], pad_token=SPECIAL[2]
    )
    config = MoonshineConfig(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=384,
        encoder_num_hidden_layers=3,
        decoder_num_hidden_layers=2,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MoonshineForConditionalGeneration(config)
    model.save_pretrained(folder)
    extractor = Wav2Vec2FeatureExtractor(do_normalize=False, return_attention_mask=True)
    Wav2Vec2Processor(extractor, tokenizer).save_pretrained(folder)


def prepare(folder: str | Path = FOLDER, seed: int = 0) -> bool:
    """Make `speech/{train,validation,test}.jsonl` and `model/` under the folder, once.

    Returns:
        whether anything was made.
    """
    root = Path(folder)

    def make() -> None:
        make_speech(root / "speech", seed)
        make_model(root / "model", sentences(), seed)

    return made_once(root, {"version": VERSION, "seed": seed}, make)


if __name__ == "__main__":
    try:
        prepare(sys.argv[1] if len(sys.argv) > 1 else FOLDER)
    except LuthierError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
