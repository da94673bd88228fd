"""Paraformer beside FunASR's own trainer, on the same real speech in the same run.

    python tests/benchmarks/paraformer.py [--steps 20] [--repeats 3]     speed: audio seconds a second
    python tests/benchmarks/paraformer.py --cer EPOCHS                   quality: both trained from the same weights

Needs `../shared` (speech) beside the clone. Nothing else should run. For the error rates both models are transcribed by
FunASR's AutoModel and scored by us, on text as the peer trains it: in lower case and without spaces.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sides import PEERS, WARMUP, alternate, child, compared, ours, parser, publish

FRAMES, LONGEST = 3000, 30.0  # the peer's: padded 10 ms frames of a batch, seconds of a clip
LEARNING_RATE, WARM = 5e-4, 30000
# Of the comparison of error rates, whose runs are shorter than that warm-up, and its model, which learns sooner.
SHORT_PEAK, SHORT_WARM = 2e-3, 100
SMALL: dict[str, dict[str, int]] = {
    "encoder_conf": {"output_size": 96, "linear_units": 384, "num_blocks": 4},
    "decoder_conf": {"linear_units": 384, "num_blocks": 2},
    "predictor_conf": {"idim": 96},
}


def peer_config(folder: Path, changes: Mapping[str, Mapping[str, int]] | None = None) -> dict[str, Any]:
    """The peer's configuration, with its manifests under the folder, and other sizes where there are changes of it."""
    sys.path.insert(0, str(PEERS))
    import funasr_paraformer

    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = funasr_paraformer.configuration(
        folder / "workloads", folder, argparse.Namespace(batch=FRAMES, seed=0)
    )
    for section, values in (changes or {}).items():
        found[section] |= values
    return found


def model_directory(config: dict[str, Any], folder: Path, weights: Path | None = None) -> Path:
    """The peer's model as a directory, without weights unless given."""
    import shutil

    import yaml

    folder.mkdir(parents=True, exist_ok=True)
    names = ("model", "encoder", "decoder", "predictor", "frontend", "specaug", "tokenizer", "ctc")
    kept = {key: value for key, value in config.items() if key.removesuffix("_conf") in names}
    tokens = kept["tokenizer_conf"] = dict(kept["tokenizer_conf"])
    (folder / "tokens.json").write_text(json.dumps(tokens.pop("token_list"), ensure_ascii=False), encoding="utf-8")
    # Dither off: it would make the transcripts of the comparison random.
    kept["frontend_conf"] = {**kept["frontend_conf"], "dither": 0.0}
    (folder / "config.yaml").write_text(yaml.safe_dump(kept, allow_unicode=True), encoding="utf-8")
    if weights is not None:
        shutil.copyfile(weights, folder / "model.pt")
    return folder


def overrides(folder: Path, rate: float, warm: int) -> list[str]:
    """Our recipe for what the peer does: the same rows, batches of as many padded seconds, optimizer and schedule."""
    return [
        f"model.path={folder}/model", f"data.train={folder}/train.jsonl", f"data.batch.seconds={FRAMES / 100}",
        "data.batch.examples=64", "data.batch.bucket_batches=1000", "data.audio.silence_dbfs=-120",
        "data.audio.max_seconds=30", "task.text=raw", "task.language=zh", "model.new_tokens=[]", "model.dither=1",
        f"optim.learning_rate={rate}", f"optim.warmup={warm}", "optim.schedule=inverse_sqrt", "optim.weight_decay=0",
        "optim.clip_norm=5", "data.max_bad=1",
    ]  # fmt: skip


def speed(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model_directory(peer_config(folder), folder / "model")
        sides = {
            "peer": [str(PEERS / "funasr_paraformer.py"), "--steps", str(options.steps)],
            "ours": [__file__, "--ours", scratch, "--steps", str(options.steps), "--threads", str(options.threads)],
        }
        results = alternate(sides, options.repeats, options.threads)
    for run in results["peer"]:
        run["real_per_second"] = run["counts"]["real_seconds"] / run["seconds"]
    publish({"paraformer": compared(results["ours"], results["peer"], "real_per_second")})


def quality(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        config = peer_config(folder, SMALL)
        model_directory(config, folder / "model", start(config, folder / "start.pt"))
        arguments = ["--threads", str(options.threads), "--cer", str(options.cer)]
        rates = {
            side: child([__file__, f"--{side}-cer", scratch, *arguments], options.threads) for side in ("peer", "ours")
        }
    print(json.dumps({"paraformer": rates}, indent=1))


def start(config: dict[str, Any], file: Path) -> Path:
    """Random weights for both."""
    import torch
    from funasr import AutoModel

    names = ("train_data_set_list", "valid_data_set_list", "output_dir")
    model = AutoModel(**{key: value for key, value in config.items() if key not in names}).model
    torch.save(model.state_dict(), file)
    return file


def train_peer(folder: Path, epochs: int) -> Path:
    """FunASR's trainer over so many epochs; its last weights."""
    from funasr.bin.train import main as train
    from omegaconf import OmegaConf

    config = peer_config(folder, SMALL)
    config |= {"init_param": str(folder / "start.pt"), "scheduler_conf": {"warmup_steps": SHORT_WARM}}
    config["optim_conf"] = {"lr": SHORT_PEAK}
    config["train_conf"] |= {"max_epoch": epochs, "keep_nbest_models": epochs}
    train(**OmegaConf.create(config))
    return folder / "out" / f"model.pt.ep{epochs}"


def train_ours(folder: Path, epochs: int) -> Path:
    from luthier.common import reading
    from luthier.common.training import run

    more = ["train.epochs=" + str(epochs), "evaluate.every=never", "data.validation=[]", f"output={folder}/run"]
    recipe = reading.load("asr/paraformer", [*overrides(folder, SHORT_PEAK, SHORT_WARM), *more])
    return run.train(recipe).folder / "checkpoints" / "last" / "model" / "model.pt"


def error_rates(config: dict[str, Any], folder: Path, weights: Path) -> dict[str, float]:
    """CER of the validation set, transcribed by FunASR."""
    from funasr import AutoModel

    from luthier.modalities.asr.metrics import Scored, score

    saved = model_directory(config, folder / "judged", weights)
    model = AutoModel(model=str(saved), device="cpu", disable_update=True, disable_pbar=True)
    rows = [json.loads(line) for line in (folder / "validation.jsonl").read_text(encoding="utf-8").splitlines()]
    texts = [model.generate(input=row["source"])[0].get("text", "") for row in rows]
    pairs = zip(rows, texts, strict=True)
    found = score([Scored(row["target"], text.lower().replace(" ", ""), "zh") for row, text in pairs], ())
    return {name: found[name] for name in ("cer", "cer_raw")}


def main() -> None:
    known = parser(__doc__, 20)
    known.add_argument("--cer", type=int, metavar="EPOCHS", help="train both so long and compare error rates")
    for name in ("ours", "ours-cer", "peer-cer"):
        known.add_argument(f"--{name}", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    options = known.parse_args()
    if options.ours:
        steps = ["train.epochs=null", f"train.steps={options.steps + WARMUP}"]
        lines = [*overrides(options.ours, LEARNING_RATE, WARM), *steps]
        print(json.dumps(ours("asr/paraformer", lines, options.threads)))
        return
    folder = options.ours_cer or options.peer_cer
    if folder is None:
        (speed if options.cer is None else quality)(options)
        return
    import torch

    torch.set_num_threads(options.threads)
    config = peer_config(folder, SMALL)
    weights = (train_ours if options.ours_cer else train_peer)(folder, options.cer)
    print(json.dumps(error_rates(config, folder, weights)))


if __name__ == "__main__":
    main()
