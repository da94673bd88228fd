"""From a recipe to a finished run: what its folder holds, resuming to the last bit, evaluations that compare."""

from __future__ import annotations

import json
import signal
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from PIL import Image
from safetensors.torch import load_file

from luthier.common.check import check
from luthier.common.errors import RecipeError
from luthier.common.evaluation.saved import evaluate_checkpoint, evaluate_recipe
from luthier.common.training import curves
from luthier.common.training.run import train
from luthier.modalities.diffusion import adapters
from luthier.modalities.diffusion.sampling import grid, side_by_side


def read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def values(folder: Path, name: str) -> list[float]:
    return [float(row["value"]) for row in curves.read(folder / "curves.csv") if row["name"] == name]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    model = (folder / "checkpoints" / "last" / "model").resolve()
    files = sorted(file for file in model.rglob("*.safetensors") if file.parent.name not in ("vae", "text_encoder"))
    assert files
    return {f"{file.name} {key}": value for file in files for key, value in load_file(file).items()}


SAMPLING = {"prompts": ["a red dot", "a dog"], "steps": 2, "guidance": 2.0}


@pytest.fixture(scope="module")
def finished(make_recipe, folder, tmp_path_factory) -> Any:
    """(folder of the run, outcome) of 6 steps with an evaluation after every 3."""
    place = tmp_path_factory.mktemp("runs") / "run"
    recipe = make_recipe(
        "sd",
        data={"train": str(folder), "validation": str(folder), "workers": 0, "batch": {"examples": 4},
              "image": {"resolution": 16, "step": 4, "min_side": 4}},
        train={"steps": 6, "accelerator": "cpu", "threads": 1, "log_every": 1},
        evaluate={"every": 3, "at_start": True, "slices": ["kind"], "sampling": SAMPLING},
        output=str(place),
    )  # fmt: skip
    return place, train(recipe)


def test_the_metrics_hold_a_curve_over_noise_and_slices(finished: Any) -> None:
    place, outcome = finished
    metrics = read(place / "metrics.json")
    assert outcome.metrics == metrics
    assert metrics["pictures"] == 8
    noise = metrics["slices"]["noise"]
    assert list(noise) == ["12.5%", "37.5%", "62.5%", "87.5%"]
    assert metrics["loss"] == pytest.approx(sum(part["loss"] for part in noise.values()) / 4, rel=1e-6)
    kinds = metrics["slices"]["kind"]
    assert {name: part["pictures"] for name, part in kinds.items()} == {"a": 4, "b": 4}
    assert metrics["loss"] == pytest.approx((kinds["a"]["loss"] + kinds["b"]["loss"]) / 2, rel=1e-6)


def test_training_lowers_the_loss(finished: Any) -> None:
    place, _ = finished
    losses = values(place, "validation/loss")
    assert len(losses) == 3
    assert losses[2] < losses[1] < losses[0]


def test_the_run_keeps_pictures_beside_the_base_model_s(finished: Any, drawn_by, make_recipe) -> None:
    place, _ = finished
    path = make_recipe("sd").model.path
    for step in (0, 3, 6):
        rows = read(place / "samples" / f"step-{step:08d}.json")
        assert [(row["prompt"], row["seed"]) for row in rows] == [("a red dot", 0), ("a dog", 1)]
        both = np.asarray(Image.open(place / "samples" / rows[0]["picture"]))
        assert both.shape[1] == 2 * 16
        base, now = both[:, :16], both[:, 16:]
        assert np.array_equal(base, np.asarray(drawn_by(path, "a red dot"))), "the base model's, at every step"
        assert np.array_equal(base, now) == (step == 0)


def test_the_checkpoint_alone_gives_the_same_numbers_and_pictures(finished: Any) -> None:
    place, _ = finished
    best = place / "checkpoints" / "best"
    again = evaluate_checkpoint(best)
    metrics = read(best / "metrics.json")
    assert again.metrics["loss"] == pytest.approx(metrics["loss"], rel=1e-6)
    assert again.metrics["slices"]["kind"].keys() == {"a", "b"}
    kept = Image.open(place / "samples" / f"step-{metrics['step']:08d}-0.png")
    assert np.array_equal(np.asarray(Image.open(BytesIO(again.samples[0]["picture"]))), np.asarray(kept))


def test_the_run_record_names_the_data(finished: Any) -> None:
    place, _ = finished
    data = read(place / "data.json")
    assert (data["train"]["rows"], data["train"]["kept_rows"], data["train"]["pixels"]) == (8, 8, 8 * 256)


# ---------------------------------------------------------------------------------------------- evaluations compare


def test_evaluations_are_the_same_every_time_whatever_the_batch(make_recipe, folder) -> None:
    found = []
    for batch, seed in ((8, 0), (3, 5), (1, 7)):
        recipe = make_recipe(
            "sd", data={"train": str(folder), "validation": str(folder), "workers": 0,
                        "image": {"resolution": 16, "step": 4, "min_side": 4}},
            train={"steps": 1, "accelerator": "cpu", "seed": seed}, evaluate={"batch": batch},
        )  # fmt: skip
        torch.manual_seed(batch)
        found.append(evaluate_recipe(recipe, "validation").metrics)
    for metrics in found[1:]:
        assert metrics["loss"] == pytest.approx(found[0]["loss"], rel=1e-6)
        assert metrics["slices"]["noise"]["12.5%"]["loss"] == pytest.approx(
            found[0]["slices"]["noise"]["12.5%"]["loss"], rel=1e-6
        )


def test_dropout_and_weights_are_not_in_the_evaluation(make_recipe, folder) -> None:
    def loss(**task: Any) -> float:
        recipe = make_recipe(
            "sd", task={"kind": "diffusion.text_to_image", **task},
            data={"train": str(folder), "validation": str(folder), "captions": {"dropout": 0.9, "shuffle": True},
                  "image": {"resolution": 16, "step": 4, "min_side": 4, "flip": 0.9}},
        )  # fmt: skip
        return float(evaluate_recipe(recipe, "validation").metrics["loss"])

    expected = loss()
    assert loss(weight={"kind": "min_snr"}, noise={"offset": 0.5, "multires": 3, "perturbation": 0.1}) == expected


def test_pictures_of_several_sizes_are_evaluated(make_recipe, paint, tmp_path: Path) -> None:
    for number, size in enumerate([(16, 16), (32, 16), (16, 32), (16, 16), (40, 16)]):
        paint(number, *size).save(tmp_path / f"{number}.png")
        (tmp_path / f"{number}.txt").write_text("x")
    recipe = make_recipe(
        "sdxl", data={"train": str(tmp_path), "validation": str(tmp_path),
                      "image": {"resolution": 16, "step": 4, "min_side": 4}},
        evaluate={"batch": 8},
    )  # fmt: skip
    assert evaluate_recipe(recipe, "validation").metrics["pictures"] == 5


def test_it_stops_when_nothing_gets_better(make_recipe, folder, tmp_path: Path) -> None:
    recipe = make_recipe(
        "sd", data={"train": str(folder), "validation": str(folder), "batch": {"examples": 4},
                    "image": {"resolution": 16, "step": 4, "min_side": 4}},
        optim={"learning_rate": 1.0, "warmup": 0, "schedule": "constant"},
        train={"steps": 30, "accelerator": "cpu"}, evaluate={"every": 1, "patience": 3},
        output=str(tmp_path / "run"),
    )  # fmt: skip
    outcome = train(recipe)
    losses = values(outcome.folder, "validation/loss")
    assert len(losses) < 30
    assert outcome.metrics["loss"] == pytest.approx(min(losses))
    assert losses[-3:] == sorted(losses[-3:], key=lambda value: value <= min(losses)), "the last three were no better"


# ---------------------------------------------------------------------------------------------- resuming


KINDS: dict[str, dict[str, Any]] = {
    "adapter": {},
    "ema, dropout, flips, tags, no cache": {
        "model": {"lora": {"rank": 2, "alpha": 2, "dropout": 0.2}, "ema": 0.9},
        "data": {"captions": {"dropout": 0.3, "shuffle": True}, "cache": {"folder": None},
                 "image": {"resolution": 16, "step": 4, "min_side": 4, "flip": 0.5, "crop": "random"}},
        "task": {"noise": {"offset": 0.1, "multires": 2, "perturbation": 0.1}},
    },
    "text encoder and words": {
        "model": {"lora": {"rank": 2, "alpha": 2}, "text_encoder_lora": {"rank": 2},
                  "new_tokens": [{"token": "<sks>", "start": "a"}]},
        "data": {"captions": {"prefix": "<sks> "}},
    },
    "whole": {"model": {"lora": None}, "optim": {"learning_rate": 1e-3}},
    "accumulated": {"train": {"accumulate": 2}},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["sd", "flux"])
def test_fault_5_a_resumed_run_is_an_uninterrupted_one(
    name: str, kind: str, make_recipe, pipeline_of, folder, tmp_path: Path, stop_before
) -> None:
    if name == "flux" and kind not in ("adapter", "whole"):
        pytest.skip("as of the others")

    def recipe(output: str) -> Any:
        more = KINDS[kind]
        model = {"path": pipeline_of(name), "lora": {"rank": 4, "alpha": 8}, **more.get("model", {})}
        data = {"train": str(folder), "validation": str(folder), "workers": 0, "batch": {"examples": 3},
                "image": {"resolution": 16, "step": 4, "min_side": 4},
                "cache": {"folder": str(tmp_path / f"cache-{output}")}, **more.get("data", {})}  # fmt: skip
        return make_recipe(
            name, model=model, data=data, task={"kind": "diffusion.text_to_image", **more.get("task", {})},
            optim={"learning_rate": 1e-2, "warmup": 2, "schedule": "cosine", **more.get("optim", {})},
            train={"steps": 7, "accelerator": "cpu", "threads": 1, "log_every": 1, **more.get("train", {})},
            evaluate={"every": 3}, checkpoint={"every": 2}, output=str(tmp_path / output),
        )  # fmt: skip

    whole = train(recipe("whole")).folder
    assert train(recipe("stopped"), [stop_before(4)]).stopped_by == signal.SIGTERM
    assert train(recipe("stopped")).stopped_by == 0
    stopped = tmp_path / "stopped"
    for curve in ("train/loss", "train/gradient_norm", "validation/loss"):
        assert values(stopped, curve) == values(whole, curve), curve
    assert len(set(values(whole, "train/loss"))) == 7
    expected, found = weights(whole), weights(stopped)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_processes_that_prepare_batches_change_nothing(make_recipe, folder, tmp_path: Path) -> None:
    found = []
    for workers in (0, 2):
        recipe = make_recipe(
            "sd", data={"train": str(folder), "workers": workers, "batch": {"examples": 4},
                        "captions": {"dropout": 0.3},
                        "image": {"resolution": 16, "step": 4, "min_side": 4, "flip": 0.5}},
            train={"steps": 4, "accelerator": "cpu", "log_every": 1}, output=str(tmp_path / str(workers)),
        )  # fmt: skip
        found.append(values(train(recipe).folder, "train/loss"))
    assert found[0] == found[1]


# ---------------------------------------------------------------------------------------------- steps


def test_fault_3_the_gradient_is_clipped(make_recipe, folder, tmp_path: Path) -> None:
    """With plain SGD at a rate of 1 the change of the weights is the clipped gradient: its norm is the bound."""
    recipe = make_recipe(
        "sd", optim={"name": "sgd", "momentum": 0.0, "learning_rate": 1.0, "clip_norm": 0.01, "weight_decay": 0.0,
                     "warmup": 0, "schedule": "constant"},
        train={"steps": 1, "accelerator": "cpu", "log_every": 1}, checkpoint={"every": 1},
        output=str(tmp_path / "run"),
    )  # fmt: skip
    seen: dict[str, torch.Tensor] = {}

    class Before(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.update({n: p.detach().clone() for n, p in pl_module.named_parameters() if p.requires_grad})

    class After(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            changes = [(p.detach() - seen[n]).flatten() for n, p in pl_module.named_parameters() if p.requires_grad]
            seen["norm"] = torch.cat(changes).norm()

    folder_of_run = train(recipe, [Before(), After()]).folder
    assert values(folder_of_run, "train/gradient_norm")[0] > 0.01, "before clipping"
    assert float(seen["norm"]) == pytest.approx(0.01, rel=1e-4)


def test_the_average_follows_the_weights(make_task) -> None:
    from luthier.modalities.diffusion.ema import Average

    parameter = torch.nn.Parameter(torch.zeros(2))
    average = Average([parameter], 0.5)
    expected = 0.0
    for number, value in enumerate((1.0, 2.0, 3.0, 4.0), 1):
        with torch.no_grad():
            parameter.fill_(value)
        average.update()
        decay = min(0.5, (1 + number) / (10 + number))
        expected = decay * expected + (1 - decay) * value
    assert average.values[0].tolist() == pytest.approx([expected] * 2)
    with average.applied():
        assert parameter.tolist() == pytest.approx([expected] * 2)
    assert parameter.tolist() == [4.0, 4.0]
    assert not list(average.parameters())


def test_the_average_is_what_is_saved_and_judged(make_task, make_recipe, folder, tmp_path: Path, batch_of) -> None:
    task = make_task("sd", model={"path": make_recipe("sd").model.path, "lora": {"rank": 2}, "ema": 0.9})
    assert task.average is not None
    with torch.no_grad():
        for number, parameter in enumerate(p for p in task.model.parameters() if p.requires_grad):
            parameter.add_(1.0)
            task.average.values[number].add_(0.5)
    task.save_pretrained(tmp_path)
    saved = adapters.read(tmp_path)[0]
    average = dict(
        zip([n for n, p in task.model.named_parameters() if p.requires_grad], task.average.values, strict=True)
    )
    assert len(saved) == len(average)
    for name, value in average.items():
        assert torch.equal(saved[name.replace(".default", "")], value)


# ---------------------------------------------------------------------------------------------- around it


def test_all_checks_pass(make_recipe, folder, paint, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = tmp_path / "held"
    held.mkdir()
    for number in (20, 21):
        paint(number).save(held / f"{number}.png")
        (held / f"{number}.txt").write_text("a dog")
    for name in ("sd", "flux"):
        recipe = make_recipe(
            name, data={"train": str(folder), "validation": str(held), "workers": 0, "batch": {"examples": 4},
                        "image": {"resolution": 16, "step": 4, "min_side": 4}},
            train={"steps": 2, "accelerator": "cpu", "precision": "bf16-mixed" if name == "flux" else "32"},
            output=str(tmp_path / name),
        )  # fmt: skip
        assert check(recipe, fast=True), capsys.readouterr().out
        assert not (tmp_path / name).exists()


def test_the_best_metric_is_known_before(make_recipe, tmp_path: Path, folder) -> None:
    recipe = make_recipe("sd", checkpoint={"best": "clip_score"}, output=str(tmp_path / "run"))
    with pytest.raises(RecipeError, match="does not give this metric"):
        train(recipe)


def test_pictures_are_laid_side_by_side_and_in_rows() -> None:
    images = [Image.new("RGB", (2, 2), (number, 0, 0)) for number in range(5)]
    assert np.asarray(side_by_side(images[1], images[2]))[0, :, 0].tolist() == [1, 1, 2, 2]
    table = np.asarray(grid(images, 2))
    assert table.shape == (6, 4, 3)
    assert table[::2, ::2, 0].tolist() == [[0, 1], [2, 3], [4, 255]]


def test_clip_sees_the_prompt_and_how_good_a_picture_looks(tmp_path: Path, paint) -> None:
    import transformers as hf
    from tokenizers.pre_tokenizers import ByteLevel

    from luthier.modalities.diffusion import clip

    letters = sorted(ByteLevel.alphabet())
    pieces = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    words = hf.CLIPTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], model_max_length=77)
    torch.manual_seed(0)
    text = {"vocab_size": len(words), "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "eos_token_id": words.eos_token_id, "bos_token_id": words.bos_token_id,
            "pad_token_id": words.pad_token_id}  # fmt: skip
    vision = {"image_size": 16, "patch_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 2}  # fmt: skip
    model = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).eval()
    size = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    processor = hf.CLIPProcessor(hf.CLIPImageProcessor(**size), words)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    images, prompts = [paint(1), paint(2)], ["a dog", "a red line"]
    found = clip.scores(str(tmp_path), images, prompts, torch.device("cpu"))
    assert found.keys() == clip.METRICS.keys()
    with torch.no_grad():
        said = model(**processor(text=prompts, images=images, return_tensors="pt", padding=True))
    pairs = said.logits_per_image.diagonal() / model.logit_scale.exp()
    assert found["clip_score"] == pytest.approx(float(100 * pairs.clamp(min=0).mean().detach()), rel=1e-5)
    with torch.no_grad():
        looks = model(**processor(text=["Good photo.", "Bad photo."], images=images, return_tensors="pt", padding=True))
    shares = (100 * looks.logits_per_image / model.logit_scale.exp()).softmax(dim=1)[:, 0]
    assert found["clip_iqa"] == pytest.approx(float(shares.mean()), rel=1e-4)


@pytest.mark.parametrize("name", ["sd", "sdxl", "sd3", "flux"])
def test_pictures_are_made_in_bfloat16_too(name: str, make_task) -> None:
    task = make_task(name, train={"steps": 1, "precision": "bf16-mixed"}, evaluate={"sampling": SAMPLING})
    base, now = task._sampled(), task._sampled()
    assert [image.size for image in now] == [(16, 16)] * 2
    assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(base, now, strict=True))
    assert task._base_pictures is not None


def test_what_the_cache_holds_is_shown(make_task, batch_of, tmp_path: Path) -> None:
    task = make_task("sd", data={"cache": {"folder": str(tmp_path)}})
    with torch.no_grad():
        task.loss(batch_of(task, 2))
    data = batch_of(task, 3)
    shown = [task.processing.show(data, row) for row in range(3)]
    assert [item.facts["latents"] for item in shown] == ["from the cache", "from the cache", "to be encoded"]
    assert all(item.picture for item in shown)
