"""A Conformer CTC model of NeMo's beside NeMo's own trainer, on the same real speech in the same run.

    .venv-nemo/bin/python tests/benchmarks/nemo_speech.py [--steps 20] [--repeats 3]     speed: audio seconds a second
    .venv-nemo/bin/python tests/benchmarks/nemo_speech.py --cer EPOCHS                   quality: both from nothing

Needs `../shared` (speech) beside the clone, and NeMo. Nothing else should run. For the error rates both models are
transcribed by NeMo and scored by us, on text as the peer trains it: in lower case. (The file is not called `nemo.py`,
as Python would take it for NeMo.)
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sides import PEERS, WARMUP, alternate, child, compared, ours, parser, publish

BUCKET = 8  # batches of similar lengths are made from so many that were drawn; with many an epoch is nearly sorted
BATCH, LONGEST, WIDTH = 8, 30.0, 176  # the peer's
PEAK, WARM = 2.0 / math.sqrt(WIDTH * 10000), 10000  # of its Noam schedule
# Of the comparison of error rates, whose runs are shorter than that warm-up, and its model, which learns sooner.
SHORT_PEAK, SHORT_WARM = 2e-3, 100
SMALL = {"n_layers": 4, "d_model": 144, "subsampling_conv_channels": 64}


def rows_of(folder: Path, split: str) -> list[dict[str, Any]]:
    """The peer's rows, with their audio as 16 kHz WAV files in the folder."""
    sys.path.insert(0, str(PEERS))
    import workloads

    rows = [row for row in workloads.speech_wav(folder, "it", split) if 0.1 <= row["duration"] <= LONGEST]
    return [{**row, "text": row["text"].lower()} for row in rows]


def write(folder: Path, rows: list[dict[str, Any]], name: str) -> Path:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps({**row, "language": "it"}, ensure_ascii=False) + "\n" for row in rows))
    return file


def peer_config(manifest: Path, changes: Mapping[str, int] | None = None) -> dict[str, Any]:
    """The peer's configuration, with another encoder where there are changes of it."""
    sys.path.insert(0, str(PEERS))
    import nemo_ctc
    import workloads

    texts = [row["text"].lower() for row in workloads.speech("it", "train") if 0.1 <= row["duration"] <= LONGEST]
    found: dict[str, Any] = nemo_ctc.configuration(
        manifest, sorted(set("".join(texts))), argparse.Namespace(batch=BATCH)
    )
    found["encoder"].update(changes or {})
    found["decoder"]["feat_in"] = found["optim"]["sched"]["d_model"] = found["encoder"]["d_model"]
    return found


def model_file(folder: Path, changes: Mapping[str, int] | None = None) -> Path:
    """The peer's model as a configuration of ours; its masks are those of `data.augment`."""
    import yaml

    config = peer_config(folder / "none", changes)
    for key in ("train_ds", "optim", "spec_augment"):
        del config[key]
    file = folder / "model.yaml"
    file.write_text(yaml.safe_dump(config, allow_unicode=True), encoding="utf-8")
    return file


def overrides(folder: Path, peak: float, warm: int) -> list[str]:
    """Our recipe for what the peer does: the same rows in batches of as many, optimizer, schedule and masks."""
    return [
        f"model.path={folder}/model.yaml", f"data.train={folder}/train.jsonl", f"data.batch.examples={BATCH}",
        "data.batch.seconds=null", f"data.batch.bucket_batches={BUCKET}", "data.audio.silence_dbfs=-120",
        "data.augment.frequency_masks=2", "data.augment.time_masks=10", "task.language=it", "optim.clip_norm=null",
        f"optim.learning_rate={peak}", f"optim.warmup={warm}", "optim.schedule=inverse_sqrt",
        "optim.betas=[0.9, 0.98]", "data.max_bad=1",
    ]  # fmt: skip


def speed(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model_file(folder)
        write(folder, rows_of(folder, "train"), "train")
        sides = {
            "peer": [str(PEERS / "nemo_ctc.py"), "--all-data", "--steps", str(options.steps)],
            "ours": [__file__, "--ours", scratch, "--steps", str(options.steps), "--threads", str(options.threads)],
        }
        results = alternate(sides, options.repeats, options.threads)
    for run in results["peer"]:
        run["real_per_second"] = run["counts"]["real_seconds"] / run["seconds"]
    publish({"nemo_ctc": compared(results["ours"], results["peer"], "real_per_second")})


def quality(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model_file(folder, SMALL)
        for split in ("train", "validation"):
            write(folder, rows_of(folder, split), split)
        arguments = ["--threads", str(options.threads), "--cer", str(options.cer)]
        rates = {
            side: child([__file__, f"--{side}-cer", scratch, *arguments], options.threads) for side in ("peer", "ours")
        }
    print(json.dumps({"nemo_ctc": rates}, indent=1))


def train_peer(folder: Path, epochs: int) -> Path:
    """NeMo's trainer over so many epochs; its last weights."""
    import lightning.pytorch as pl
    from nemo.collections.asr.models import EncDecCTCModel
    from omegaconf import OmegaConf

    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    manifest = folder / "train.json"
    named = [{"audio_filepath": row["audio"], "duration": row["duration"], "text": row["text"]} for row in rows]
    manifest.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in named), encoding="utf-8")
    config = peer_config(manifest, SMALL)
    config["optim"]["lr"] = SHORT_PEAK * math.sqrt(SMALL["d_model"] * SHORT_WARM)
    config["optim"]["sched"]["warmup_steps"] = SHORT_WARM
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(folder),
    )  # fmt: skip
    model = EncDecCTCModel(cfg=OmegaConf.create(config), trainer=trainer)
    trainer.fit(model)
    model.save_to(str(folder / "peer.nemo"))
    return folder / "peer.nemo"


def train_ours(folder: Path, epochs: int) -> Path:
    from luthier.common import reading
    from luthier.common.training import run

    more = [f"train.epochs={epochs}", "evaluate.every=never", "data.validation=[]", f"output={folder}/run"]
    recipe = reading.load("asr/nemo-ctc", [*overrides(folder, SHORT_PEAK, SHORT_WARM), *more])
    return run.train(recipe).folder / "checkpoints" / "last" / "model" / "model.nemo"


def error_rates(folder: Path, weights: Path) -> dict[str, float]:
    """CER and WER of the validation set, transcribed by NeMo."""
    from nemo.collections.asr.models import ASRModel

    from luthier.modalities.asr.metrics import Scored, score

    model = ASRModel.restore_from(str(weights), map_location="cpu").eval()
    rows = [json.loads(line) for line in (folder / "validation.jsonl").read_text(encoding="utf-8").splitlines()]
    found = model.transcribe([row["audio"] for row in rows], batch_size=BATCH, verbose=False)
    pairs = zip(rows, found, strict=True)
    rates = score([Scored(row["text"], one.text, "it") for row, one in pairs], ())
    return {name: rates[name] for name in ("cer", "cer_raw", "wer")}


def main() -> None:
    known = parser(__doc__, 20)
    known.add_argument("--cer", type=int, metavar="EPOCHS", help="train both so long and compare error rates")
    for name in ("ours", "ours-cer", "peer-cer"):
        known.add_argument(f"--{name}", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    options = known.parse_args()
    if options.ours:
        steps = ["train.epochs=null", f"train.steps={options.steps + WARMUP}"]
        lines = [*overrides(options.ours, PEAK, WARM), *steps]
        print(json.dumps(ours("asr/nemo-ctc", lines, options.threads)))
        return
    folder = options.ours_cer or options.peer_cer
    if folder is None:
        (speed if options.cer is None else quality)(options)
        return
    import torch

    torch.set_num_threads(options.threads)
    weights = (train_ours if options.ours_cer else train_peer)(folder, options.cer)
    print(json.dumps(error_rates(folder, weights)))


if __name__ == "__main__":
    main()
