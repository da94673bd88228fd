"""Image-generation LoRA beside the steps of diffusers' own script, on the same pictures in the same run.

    python tests/benchmarks/diffusion.py [--steps 6] [--repeats 3] [--settings warm cold bf16]

Both sides train the same adapter on the same pictures. The peer
encodes pictures and captions at every step, ours keeps what frozen parts give. `warm` has latents and text embeddings
in the cache, `cold` begins with an empty one, `uncached` has none, `bf16` is warm in bf16-mixed. Nothing else should
run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from sides import PEERS, WARMUP, alternate, compared, make_workloads, ours, parser, publish

BATCH, SIDE = 16, 64
SETTINGS = {
    "warm": [],
    "cold": [],
    "uncached": ["data.cache.folder=null"],
    "bf16": ["train.precision=bf16-mixed"],
}
"""Of each comparison: our overrides."""


def main() -> None:
    options = parser(__doc__, 6, SETTINGS, ["warm", "cold", "bf16"]).parse_args()
    if options.ours:
        setting, workloads = options.ours
        print(json.dumps(_ours(setting, Path(workloads), options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        make_workloads(folder, "tokenizer", "diffusion", "images")
        prepare(Path(folder), BATCH * (options.steps + WARMUP))
        common = ["--steps", str(options.steps)]
        peer = [str(PEERS / "diffusers_lora.py"), *common, "--workloads", folder, "--batch", str(BATCH)]
        sides = {"peer": peer}
        for setting in options.settings:
            sides[setting] = [__file__, *common, "--threads", str(options.threads), "--ours", setting, folder]
        results = alternate(sides, options.repeats, options.threads)
    table = {
        f"image_lora_{setting}": compared(results[setting], results["peer"], "items_per_second")
        for setting in options.settings
    }
    publish(table)


def prepare(workloads: Path, number: int) -> None:
    """Make the parts a pipeline directory that loads as one, and name the pictures that the peer trains on."""
    from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import AutoTokenizer, CLIPTextModel

    parts = workloads / "diffusion"
    StableDiffusionPipeline(
        vae=AutoencoderKL.from_pretrained(parts / "vae"),
        text_encoder=CLIPTextModel.from_pretrained(parts / "text_encoder"),
        tokenizer=AutoTokenizer.from_pretrained(parts / "tokenizer"),
        unet=UNet2DConditionModel.from_pretrained(parts / "unet"),
        scheduler=DDPMScheduler.from_pretrained(parts / "scheduler"),
        safety_checker=None,
        feature_extractor=None,
        image_encoder=None,
        requires_safety_checker=False,
    ).save_pretrained(workloads / "pipeline")
    rows = (workloads / "images" / "metadata.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (workloads / "images" / "first.jsonl").write_text("".join(rows[:number]), encoding="utf-8")


def _ours(setting: str, workloads: Path, options: argparse.Namespace) -> dict[str, object]:
    cache = workloads / f"cache-{setting}"
    overrides = [
        f"model.path={workloads / 'pipeline'}", f"data.train={workloads / 'images' / 'first.jsonl'}",
        f"data.batch.examples={BATCH}", f"data.image.resolution={SIDE}", "data.image.step=8", "data.image.flip=0.5",
        "data.captions.dropout=0", f"data.cache.folder={cache}", "task.weight.kind=none", "model.lora.rank=4",
        "model.lora.alpha=4", "model.lora.init=gaussian", "train.epochs=null",
        f"train.steps={options.steps + WARMUP}", "optim.schedule=constant", "optim.warmup=0", "train.log_every=1",
        *SETTINGS[setting],
    ]  # fmt: skip
    if setting == "cold":
        shutil.rmtree(cache, ignore_errors=True)
    elif setting != "uncached" and not cache.exists():
        _fill(overrides, options.threads)
    return ours("diffusion/sd15-lora", overrides, options.threads)


def _fill(overrides: list[str], threads: int) -> None:
    """Bring every picture, mirrored or not, into the cache: what the epochs before would have done."""
    import numpy as np
    import torch

    from luthier.common import reading
    from luthier.common.data.collect import collect
    from luthier.modalities.diffusion.text_to_image.task import Task

    torch.set_num_threads(threads)
    for flip in (0.0, 1.0):
        recipe = reading.load("diffusion/sd15-lora", [*overrides, f"data.image.flip={flip}"])
        task = Task(recipe)
        processing, generator = task.processing, np.random.default_rng(0)
        examples = collect(recipe.data.train, processing, recipe.data).examples
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=recipe.train.precision == "bf16-mixed"):
            for at in range(0, len(examples), BATCH):
                rows = [processing.encode(example, generator) for example in examples[at : at + BATCH]]
                task.loss(processing.collate(rows, generator))


if __name__ == "__main__":
    main()
