"""New words whose embeddings are learned (textual inversion, Gal et al., arXiv:2208.01618)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...common.errors import ModelError
from .families import Family
from .sections import TokenSection

FOLDER = "embeddings"
SHORT = {"text_encoder": "clip_l", "text_encoder_2": "clip_g"}
"""Names of the encoders in a file that holds embeddings for both of SDXL's."""


class GrownEmbedding(nn.Module):
    """An embedding table with trained rows after the others.

    Args:
        base: the table as it was; frozen.
        first: id of the first new row; all ids from there on are new.
        rows: start values of the new rows [N, D].
    """

    def __init__(self, base: nn.Module, first: int, rows: Tensor):
        super().__init__()
        self.base, self.first = base.requires_grad_(False), first
        self.rows = nn.Parameter(rows.detach().clone())

    def forward(self, ids: Tensor) -> Tensor:
        """Embeddings [B, T, D] of ids [B, T]."""
        new = ids >= self.first
        known = self.base(ids.masked_fill(new, 0))
        found = nn.functional.embedding((ids - self.first).clamp(min=0), self.rows)
        return torch.where(new.unsqueeze(-1), found.to(known.dtype), known)


def names(section: TokenSection) -> list[str]:
    """The tokens that a word stands for, as diffusers names them: `<a>`, `<a>_1`, ..."""
    return [section.token, *(f"{section.token}_{number}" for number in range(1, section.vectors))]


def add(pipe: Any, family: Family, sections: Sequence[TokenSection]) -> None:
    """Add words to the CLIP tokenizers of a pipeline, and their rows to its text encoders.

    Raises:
        ModelError: a word is known already, or a start word is unknown.
    """
    for encoder_name in family.clip_encoders:
        words = getattr(pipe, encoder_name.replace("text_encoder", "tokenizer"))
        encoder = getattr(pipe, encoder_name)
        first, starts = len(words), []
        for section in sections:
            ids = words(section.start, add_special_tokens=False).input_ids
            if not ids:
                raise ModelError("the start word gives no token", where="model.new_tokens.start", given=section.start)
            if not words.get_vocab().keys().isdisjoint(names(section)):
                raise ModelError("the tokenizer knows this word", where="model.new_tokens.token", given=section.token)
            words.add_tokens(names(section))
            starts += [ids[number % len(ids)] for number in range(section.vectors)]
        table = encoder.get_input_embeddings()
        encoder.set_input_embeddings(GrownEmbedding(table, first, table.weight[torch.tensor(starts)]))


def tables(pipe: Any, family: Family) -> Mapping[str, GrownEmbedding]:
    """The grown tables of a pipeline, by text encoder."""
    found = {name: getattr(pipe, name).get_input_embeddings() for name in family.clip_encoders}
    return {name: table for name, table in found.items() if isinstance(table, GrownEmbedding)}


def file_of(directory: Path, section: TokenSection) -> Path:
    """Where a word's embeddings are saved: `embeddings/<a>.safetensors`, with other signs as `_`."""
    plain = re.sub(r"[^\w<>-]", "_", section.token)
    return directory / FOLDER / f"{plain}.safetensors"


def save(pipe: Any, family: Family, sections: Sequence[TokenSection], directory: Path) -> None:
    """Write one file for each word, as `pipe.load_textual_inversion` takes it: {word: [N, D]}; with two text encoders
    {clip_l: [N, D], clip_g: [N, D]}, each to be loaded with its `text_encoder`, `tokenizer` and the word as `token`."""
    from safetensors.torch import save_file

    (directory / FOLDER).mkdir(exist_ok=True)
    at = 0
    for section in sections:
        found = {
            SHORT[name] if len(family.clip_encoders) > 1 else section.token: table.rows[at : at + section.vectors]
            for name, table in tables(pipe, family).items()
        }
        at += section.vectors
        tensors = {name: rows.detach().cpu().contiguous() for name, rows in found.items()}
        save_file(tensors, file_of(directory, section), metadata={"format": "pt", "token": section.token})


def load(pipe: Any, family: Family, sections: Sequence[TokenSection], directory: Path) -> None:
    """Put saved words into a pipeline that does not know them, by diffusers' own loader."""
    from safetensors.torch import load_file

    for section in sections:
        file = file_of(directory, section)
        if len(family.clip_encoders) == 1:
            pipe.load_textual_inversion(str(file))
            continue
        saved = load_file(file)
        for name in family.clip_encoders:
            words = getattr(pipe, name.replace("text_encoder", "tokenizer"))
            pipe.load_textual_inversion(
                saved[SHORT[name]], token=section.token, text_encoder=getattr(pipe, name), tokenizer=words
            )


def restore(pipe: Any, family: Family, sections: Sequence[TokenSection], directory: Path) -> None:
    """Put saved embeddings into words that are there already.

    Raises:
        ModelError: a file is missing, or holds another number of vectors.
    """
    from safetensors.torch import load_file

    at = 0
    for section in sections:
        file = file_of(directory, section)
        try:
            tensors = load_file(file)
        except OSError as error:
            raise ModelError(f"the embeddings can't be read: {error}", where=file) from error
        for name, table in tables(pipe, family).items():
            rows = tensors[SHORT[name] if len(family.clip_encoders) > 1 else section.token]
            with torch.no_grad():
                table.rows[at : at + section.vectors].copy_(rows)
        at += section.vectors
