"""The estimator's memory beside that of the run: for each kind a model that is small but not tiny, on CPU.

    python tests/benchmarks/estimate.py [NAME ...] [--json FILE]

Predicted: what `luthier estimate` says of the recipe, from the model's configuration. Measured: the peak of resident
memory of `luthier train` over two optimizer steps, less what the process had before, in a process of its own that has
trained the same once already: the first training of a process also loads the libraries, which is not the model's.
Models and data are made here by the makers of the tests' own.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "modalities"
STEPS = 2


def conftest(folder: str) -> ModuleType:
    """The makers of small models and data of a folder of tests."""
    spec = importlib.util.spec_from_file_location(f"makers_{folder.replace('/', '_')}", TESTS / folder / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def grown(folder: Path, kind: Any, **sizes: Any) -> Path:
    """A saved model of transformers made again, larger."""
    config = kind.config_class.from_pretrained(folder)
    for name, value in sizes.items():
        setattr(config, name, value)
    settings = folder / "generation_config.json"
    kept = settings.read_text() if settings.exists() else None
    kind(config).save_pretrained(folder)
    if kept is not None:
        settings.write_text(kept)
    return folder


def language(place: Path) -> list[str]:
    """A decoder of 28 million parameters on batches of 512 tokens."""
    makers = conftest("llm")
    makers.SIZES.update(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
        head_dim=64, max_position_embeddings=2048,
    )  # fmt: skip
    makers.save_model(place / "model", "llama", "chatml", rows=8192)
    makers.write_rows(place / "rows.jsonl", [makers.dialogue(at, 1 + at % 12) for at in range(200)])
    return ["data.batch.tokens=512", "data.batch.packing=true", "data.max_length=512"]


def pairs(place: Path) -> list[str]:
    """The same decoder on pairs of answers."""
    language(place)
    rows = [
        {"prompt": f"What of {at}?", "chosen": f"It is {at}. " * 8, "rejected": "No, it is not. " * 8}
        for at in range(100)
    ]
    conftest("llm").write_rows(place / "rows.jsonl", rows)
    return ["data.batch.tokens=512", "data.max_length=512"]


def answers(place: Path) -> list[str]:
    """The same decoder on its own answers, 8 of 32 tokens to each of 4 prompts, which differ in what they are worth."""
    language(place)
    rows = [{"prompt": f"What of {at}? " * 4, "answer": str(at)} for at in range(100)]
    conftest("llm").write_rows(place / "rows.jsonl", rows)
    code = "def reward(answers):\n    return [len(one.completion) % 7 for one in answers]\n"
    (place / "reward.py").write_text(code)
    return [
        "data.batch.examples=4", "data.max_length=512", "rollout.num_generations=8", "rollout.max_new_tokens=32",
        f"rewards=[{{kind: function, function: '{place}/reward.py:reward'}}]",
    ]  # fmt: skip


def speech(place: Path, makers: ModuleType) -> None:
    """Recordings of 4 to 6 seconds."""
    waves = [makers.make_tone(at, 4.0 + at % 3) for at in range(24)]
    rows = [{"text": f"one two {'three ' * (at % 5)}{at}", "language": "en"} for at in range(24)]
    makers.make_manifest(place, waves, rows)


def whisper(place: Path) -> list[str]:
    """An encoder and decoder of 23 million parameters."""
    from transformers import WhisperForConditionalGeneration

    own, shared = conftest("asr/whisper"), conftest("asr")
    own.CHUNK_SECONDS = 10
    folder = own.save_whisper(place / "model", own.make_tokenizer(("en",)), True, ("en",))
    grown(folder, WhisperForConditionalGeneration, d_model=384, encoder_layers=4, decoder_layers=6,
          encoder_attention_heads=6, decoder_attention_heads=6, encoder_ffn_dim=1536, decoder_ffn_dim=1536)  # fmt: skip
    speech(place, shared)
    return ["data.batch.examples=8"]


def ctc(place: Path) -> list[str]:
    """A wav2vec 2.0 of 20 million parameters."""
    from transformers import Wav2Vec2ForCTC

    own, shared = conftest("asr/ctc"), conftest("asr")
    folder = Path(own.make_model(place / "model", "wav2vec2:group"))
    grown(folder, Wav2Vec2ForCTC, hidden_size=384, num_hidden_layers=10, num_attention_heads=6, intermediate_size=1536,
          num_conv_pos_embeddings=128, num_conv_pos_embedding_groups=16)  # fmt: skip
    speech(place, shared)
    (place / "rows.jsonl").write_text("".join(
        json.dumps({**json.loads(line), "text": "one two three"}) + "\n"
        for line in (place / "rows.jsonl").read_text().splitlines()[:1]
    ) + "".join(
        json.dumps({**json.loads(line), "text": "good day"}) + "\n"
        for line in (place / "rows.jsonl").read_text().splitlines()[1:]
    ))  # fmt: skip
    return ["data.batch.examples=8", "model.freeze_feature_encoder=false"]


def encoder(place: Path) -> list[str]:
    """A BERT of 20 million parameters."""
    import transformers as hf

    makers = conftest("embedding")
    makers.SIZES.update(hidden_size=512, num_hidden_layers=6, num_attention_heads=8, intermediate_size=2048)
    (place / "model").mkdir()
    makers.write_bert(place / "model", hf.BertModel)
    rows = [{"anchor": f"ask {'q1 q2 ' * 12}{at}", "positive": f"tell {'d1 d2 ' * 20}{at}"} for at in range(200)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["data.batch.examples=32"]


def lists(place: Path) -> list[str]:
    """A BERT of the same size with a head, on a query and 4 documents each."""
    import transformers as hf

    overrides = encoder(place)
    grown(place / "model", hf.BertForSequenceClassification, num_labels=1)
    rows = [
        {"anchor": f"ask {'q1 q2 ' * 8}{at}", "positive": f"tell {'d1 d2 ' * 20}{at}",
         "negatives": [f"tell {'d3 d4 ' * 20}{at + n}" for n in range(3)]}
        for at in range(100)
    ]  # fmt: skip
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [*overrides, "data.batch.examples=8", "task.loss=group_softmax"]


def pictures(place: Path) -> list[str]:
    """A Stable Diffusion of 24 million parameters in its denoiser, trained as a whole."""
    import diffusers as df

    makers = conftest("diffusion")
    pipe = makers.stable_diffusion()
    pipe.unet = df.UNet2DConditionModel(
        sample_size=16, block_out_channels=(128, 256), layers_per_block=2, norm_num_groups=32, attention_head_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=makers.CLIP_WIDTH,
    )  # fmt: skip
    pipe.save_pretrained(place / "model")
    rows = []
    for number in range(16):
        makers.painted(number, 64, 64).save(place / f"{number}.png")
        rows.append({"file_name": f"{number}.png", "text": makers.CAPTIONS[number % 8]})
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["data.batch.examples=8", "data.image.resolution=64", "data.image.step=4", "data.image.min_side=4",
            "model.lora=null"]  # fmt: skip


CASES: dict[str, tuple[str, Callable[[Path], list[str]]]] = {
    "llm.sft": ("llm.sft", language),
    "llm.sft, checkpointing": ("llm.sft", lambda place: [*language(place), "train.gradient_checkpointing=true"]),
    "llm.sft, adapter": (
        "llm.sft", lambda place: [*language(place), "model.lora.rank=16", "model.lora.target_modules=all-linear"],
    ),
    "llm.dpo": ("llm.dpo", pairs),
    "llm.reward": ("llm.reward", pairs),
    "llm.grpo": ("llm.grpo", answers),
    "asr.whisper": ("asr.whisper", whisper),
    "asr.ctc": ("asr.ctc", ctc),
    "embedding.dense": ("embedding.dense", encoder),
    "embedding.reranker": ("embedding.reranker", lists),
    "diffusion.text_to_image": ("diffusion.text_to_image", pictures),
}  # fmt: skip


def recipe_of(kind: str, place: Path, overrides: list[str]) -> Any:
    """The recipe of a case."""
    from luthier.common import reading

    tree = {
        "task": {"kind": kind}, "model": {"path": str(place / "model")},
        "data": {"train": str(place / "rows.jsonl"), "workers": 0},
        "train": {"steps": STEPS, "accelerator": "cpu", "devices": 1, "threads": 1},
        "checkpoint": {"every": None}, "output": str(place / "run"),
    }  # fmt: skip
    return reading.build(reading.override(tree, overrides), "benchmark")


def measured(kind: str, place: str, overrides: list[str]) -> int:
    """Bytes that a training takes at most beside what this process has before, when it has trained once."""
    import torch

    from luthier.common.check import memory
    from luthier.common.training import run

    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    run.train(recipe_of(kind, Path(place), [*overrides, f"output={place}/first"]))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free goes back to the system
    memory.restart(cpu)
    before = memory.used(cpu)
    run.train(recipe_of(kind, Path(place), overrides))
    return memory.peak(cpu) - before


def predicted(kind: str, place: str, overrides: list[str]) -> int:
    """The same by the estimate."""
    from luthier.common.estimate import estimate

    found = estimate(recipe_of(kind, Path(place), overrides), device="h100")
    return int(found["memory"]["auto"]["total"])


def apart(step: Callable[..., int], *arguments: Any) -> int:
    """The result of a function in a process of its own, forked from one that has the libraries."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "luthier.common.training.run", "peft"])
    with context.Pool(1) as pool:
        return pool.apply(step, arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = {}
    for name in arguments.names or CASES:
        kind, make = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            overrides = make(Path(folder))
            one, other = (apart(step, kind, folder, overrides) for step in (predicted, measured))
        rows[name] = {"predicted": one, "measured": other}
        print(
            f"{name}: {one / 1e6:.0f} MB predicted, {other / 1e6:.0f} MB measured, {one / other - 1:+.1%}", flush=True
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # fixed, so that a freed tensor is given back at once
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
    main()
