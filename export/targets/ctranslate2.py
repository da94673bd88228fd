"""Whisper for CTranslate2, with the files that faster-whisper reads beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...common.exportable import Rules, Spoken
from ..source import Source

needs_whole = True
FILES = ("tokenizer.json", "preprocessor_config.json", "generation_config.json")
COMPUTE = {"float32": "float32", "float16": "float32", "int8": "int8_float32"}
"""What a CPU computes in; 16-bit weights are stored so, and widened where the device has no such arithmetic."""


def write(source: Source, directory: Path, dtype: str) -> None:
    """Convert the merged model; weights are stored in `dtype`."""
    from ctranslate2.converters import TransformersConverter

    converter = TransformersConverter(str(source.merged), copy_files=list(FILES))
    converter.convert(str(directory), quantization=dtype, force=True)
    extractor = directory / "preprocessor_config.json"
    settings = json.loads(extractor.read_text(encoding="utf-8"))
    settings.pop("processor_class", None)
    extractor.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


class Runner:
    """Whisper in CTranslate2."""

    def __init__(self, directory: Path, compute: str, control: dict[str, int]):
        import ctranslate2

        self.model = ctranslate2.models.Whisper(str(directory), device="cpu", compute_type=compute)
        self.end = control["<|endoftext|>"]

    def transcribe(
        self, features: np.ndarray, prompts: Sequence[Sequence[int]], most: int, rules: Rules
    ) -> list[Spoken]:
        """The most probable transcripts; CTranslate2 applies the rules that its own config names."""
        import ctranslate2

        view = ctranslate2.StorageView.from_array(np.ascontiguousarray(features, dtype=np.float32))
        asked = [list(prompt) for prompt in prompts]
        # It takes the lesser of half of `max_length` and what the prompt leaves of it.
        longest = max(2 * most, most + len(asked[0]))
        found = self.model.generate(view, asked, beam_size=1, max_length=longest, return_logits_vocab=True)
        return [self._spoken(result) for result in found]

    def _spoken(self, result: Any) -> Spoken:
        ids = [token for token in result.sequences_ids[0] if token != self.end]
        logits = np.stack([np.array(step, dtype=np.float32).reshape(-1) for step in result.logits[0]])
        return Spoken(ids, logits)


def runner(source: Source, directory: Path, dtype: str) -> Runner:
    """The artifact on the CPU."""
    tokens = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    return Runner(directory, COMPUTE[dtype], {token["content"]: token["id"] for token in tokens})
