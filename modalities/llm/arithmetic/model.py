"""A small Llama from a configuration, with random weights, and a tokenizer that reads numbers digit by digit."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

_END, _TURN, _TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)  # ChatML


def make_model(folder: str | Path, texts: Iterable[str], seed: int = 0) -> None:
    """Write a small untrained Llama and its tokenizer, as `from_pretrained(folder)` loads them.

    Args:
        folder: where the files go; made if need be.
        texts: what the tokenizer learns its words from; any other text is spelled in bytes.
        seed: fixes the weights.
    """
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = make_tokenizer(texts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _make_llama(tokenizer)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer whose pieces are the words of the texts, single digits, and bytes; it writes ChatML."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    learner = Tokenizer(models.BPE())
    apart = pre_tokenizers.Split(Regex(r"[0-9+=,:?.]"), "isolated")
    learner.pre_tokenizer = pre_tokenizers.Sequence([apart, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    learner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator(texts, trainer)
    learner.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in (_END, _TURN, _TURN_END)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=learner, eos_token=_TURN_END, pad_token=_END)
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def _make_llama(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=512,
            initializer_range=0.08,  # about 1 / sqrt(hidden_size): with Llama's 0.02 so small a model learns slowly
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
