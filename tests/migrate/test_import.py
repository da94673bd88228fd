"""Files of other tools, written after their documentation, become recipes, and each of their keys is accounted for."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from luthier.common import cli, reading
from luthier.common.check import check
from luthier.common.errors import RecipeError
from luthier.migrate.engine import TOOLS, Imported, guess, import_file

FILES = Path(__file__).parent / "files"
NAMES = sorted(str(file.relative_to(FILES).with_suffix("")) for file in FILES.rglob("*.yaml"))
KINDS = {"ms-swift/pretrain": "llm.pretrain", "trl/mixer-qlora": "llm.sft"}  # which only the command line says


def imported(name: str) -> Imported:
    return import_file(FILES / f"{name}.yaml", kind=KINDS.get(name))


def leaves(value: Any, path: str = "") -> set[str]:
    """Paths of all keys of a file that hold no further mapping."""
    if isinstance(value, dict) and value:
        return {leaf for key, one in value.items() for leaf in leaves(one, f"{path}.{key}" if path else key)}
    if isinstance(value, list) and any(isinstance(one, dict) for one in value):
        return {leaf for at, one in enumerate(value) for leaf in leaves(one, f"{path}[{at}]")}
    return {path}


def test_there_are_five_files_of_each_tool() -> None:
    counts = {tool: sum(name.startswith(f"{tool}/") for name in NAMES) for tool in TOOLS}
    assert min(counts.values()) >= 5, counts


@pytest.mark.parametrize("name", NAMES)
def test_every_key_is_accounted_for_and_the_recipe_is_valid(name: str) -> None:
    found = imported(name)
    assert found.tool == name.split("/")[0]
    assert found.recipe is not None, found.problem
    said = {line.key for line in found.lines}
    for leaf in leaves(yaml.safe_load((FILES / f"{name}.yaml").read_text())):
        above = {leaf.rsplit(end, 1)[0] for end in (".", "[") if end in leaf} | {leaf.split(".")[0]}
        assert leaf in said or any(one.startswith(f"{leaf}[") for one in said) or above & said, leaf
    unknown = [line.key for line in found.lines if "not a key of" in line.told]
    assert not unknown
    assert all(line.told for line in found.lines)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read_again(name: str, tmp_path: Path) -> None:
    found = imported(name)
    file = tmp_path / "recipe.yaml"
    file.write_text(found.text(), encoding="utf-8")
    assert reading.load(file) == found.recipe


# name: fields of the recipe, by hand from the file and the tool's documentation
EXPECTED: dict[str, dict[str, Any]] = {
    "axolotl/sft-full": {
        "task.kind": "llm.sft", "model.path": "Qwen/Qwen2.5-1.5B-Instruct", "model.kernels": "liger",
        "model.lora": None,
        "data.batch.packing": True, "data.batch.tokens": 8192, "data.max_length": 4096, "train.accumulate": 4,
        "optim.learning_rate": 1e-5, "optim.final": 0.1, "optim.warmup": 0.05, "train.strategy": "fsdp2",
        "train.precision": "bf16-mixed", "evaluate.every": 100, "checkpoint.every": 200, "checkpoint.keep_last": 3,
        "train.gradient_checkpointing": True, "data.roles": ("assistant",),
    },
    "axolotl/lora-alpaca": {
        "model.lora.rank": 16, "model.lora.alpha": 32, "model.lora.dropout": 0.05, "optim.name": "adamw_8bit",
        "optim.warmup": 10, "data.batch.tokens": 4096, "checkpoint.every": None, "model.quantization": "none",
    },
    "axolotl/qlora-completion": {
        "task.kind": "llm.pretrain", "model.quantization": "nf4", "model.lora.rslora": True, "train.seed": 7,
        "model.lora.target_modules": "all-linear", "optim.name": "paged_adamw_8bit", "optim.betas": (0.9, 0.95),
        "optim.eps": 1e-5, "optim.schedule": "linear", "data.batch.examples": 1, "train.accumulate": 8,
    },
    "axolotl/sft-plugins": {
        "task.kind": "llm.sft", "model.quantization": "nf4", "model.kernels": "torch", "data.batch.tokens": 2048,
        "data.train.0.split": "train[:20%]", "track.loggers": ("csv", "wandb"), "train.gradient_checkpointing": True,
        "checkpoint.every": None,
    },
    "axolotl/dpo-lora": {
        "task.kind": "llm.dpo", "task.loss.0.name": "sigmoid", "task.beta": 0.2, "task.sft_weight": 0.5,
        "task.precompute_reference": True, "train.strategy": "deepspeed_zero2", "evaluate.every": 50,
        "track.loggers": ("csv", "tensorboard"), "data.validation.0.path": "preferences/pairs-test.jsonl",
    },
    "axolotl/kto": {"task.kind": "llm.kto", "task.desirable_weight": 0.4, "train.steps": 20, "train.epochs": None},
    "axolotl/reward": {"task.kind": "llm.reward", "task.centering": 0.01, "optim.warmup": 0.1},
    "axolotl/grpo": {
        "task.kind": "llm.grpo", "task.kl.weight": 0.001, "rollout.num_generations": 4, "rollout.max_new_tokens": 256,
        "rewards.0.function": "my_rewards:right_answer", "rewards.1.weight": 0.2, "data.batch.examples": 2,
        "train.accumulate": 2, "data.max_length": 1280,
    },
    "axolotl/pretrain": {
        "task.kind": "llm.pretrain", "data.streaming": True, "train.steps": 1000, "data.buffer": 5000,
        "optim.schedule": "constant", "data.max_length": 2048,
    },
    "llama-factory/sft-full": {
        "task.kind": "llm.sft", "model.lora": None, "train.strategy": "deepspeed_zero3", "optim.warmup": 0.1,
        "train.epochs": 3.0, "optim.weight_decay": 0.0, "train.gradient_checkpointing": True, "data.workers": 4,
    },
    "llama-factory/lora-sft": {
        "model.lora.rank": 16, "model.lora.alpha": 32, "model.lora.target_modules": ("q_proj", "v_proj"),
        "model.lora.rslora": True, "data.turns": "last", "data.batch.tokens": 4096, "task.neftune_alpha": 5,
        "model.kernels": "liger", "evaluate.every": 200, "evaluate.batch": 2,
    },
    "llama-factory/qlora-sft": {
        "model.quantization": "nf4", "model.lora.rank": 8, "model.lora.alpha": 16, "train.steps": 300,
        "model.lora.modules_to_save": ("embed_tokens", "lm_head"), "optim.name": "paged_adamw_8bit",
    },
    "llama-factory/pretrain": {
        "task.kind": "llm.pretrain", "train.precision": "bf16-true", "train.gradient_checkpointing": False,
    },
    "llama-factory/dpo": {"task.loss.0.name": "sigmoid", "task.beta": 0.1, "task.sft_weight": 0.3},
    "llama-factory/simpo": {
        "task.loss.0.name": "simpo", "task.beta": 2.0, "task.simpo_gamma": 1.2, "optim.learning_rate": 5e-6,
        "model.lora.alpha": 16,
    },
    "llama-factory/kto": {"task.kind": "llm.kto", "task.undesirable_weight": 1.5},
    "llama-factory/ppo": {
        "task.kind": "llm.ppo", "rollout.iterations": 2, "rollout.steps": 2, "rollout.max_new_tokens": 256,
        "rollout.top_p": 0.9, "rollout.temperature": 0.95, "rewards.0.path": "saves/qwen/full/reward",
        "rollout.top_k": None, "rollout.num_generations": 1, "data.max_length": 768, "data.batch.examples": 2,
    },
    "llama-factory/reward": {"task.kind": "llm.reward", "train.precision": "16-mixed"},
    "ms-swift/sft-lora": {
        "task.kind": "llm.sft", "model.lora.rank": 8, "model.lora.dropout": 0.05, "train.accumulate": 16,
        "data.train.1.path": "support/english.jsonl", "optim.weight_decay": 0.1, "optim.betas": (0.9, 0.95),
        "data.too_long.turns": "keep", "data.too_long.prompt": "keep",
    },
    "ms-swift/sft-full": {
        "model.lora": None, "train.strategy": "deepspeed_zero3", "data.turns": "last", "data.batch.tokens": 4096,
        "checkpoint.every": None, "model.kernels": "liger",
    },
    "ms-swift/qlora": {
        "model.quantization": "nf4", "model.lora.init": "default", "task.neftune_alpha": 10, "train.steps": 200,
        "model.lora.target_modules": ("q_proj", "k_proj", "v_proj"),
    },
    "ms-swift/pretrain": {"task.kind": "llm.pretrain", "optim.final": 0.1, "data.max_length": 2048},
    "ms-swift/dpo": {
        "task.loss.0.name": "sigmoid", "task.loss.0.weight": 0.8, "task.loss.1.name": "bco_pair",
        "task.loss.1.weight": 0.2, "task.sft_weight": 0.1, "evaluate.every": "never",
    },
    "ms-swift/grpo": {
        "task.loss": "dapo", "task.kl.weight": 0.02, "task.clip_high": 0.28, "task.mask_truncated": True,
        "task.zero_variance": "resample", "task.resample": 2, "rollout.top_k": 50, "rollout.top_p": 0.95,
        "rewards.0.kind": "number", "rewards.1.weight": 0.5, "data.batch.examples": 1, "train.accumulate": 2,
        "data.max_length": 768,
    },
    "ms-swift/kto": {"task.undesirable_weight": 1.2},
    "ms-swift/kto-2": {
        "model.path": "LLM-Research/Meta-Llama-3.1-8B-Instruct", "model.lora.dropout": 0.1, "model.lora.alpha": 32,
        "model.lora.target_modules": "all-linear", "data.batch.examples": 2, "checkpoint.keep_last": 2,
    },
    "ms-swift/ppo": {
        "task.kind": "llm.ppo", "task.kl.weight": 0.05, "rollout.iterations": 4, "rollout.num_generations": 1,
        "rollout.max_new_tokens": 512, "rewards.0.kind": "model", "rewards.0.path": "output/rm",
    },
    "ms-swift/reward": {"task.kind": "llm.reward", "task.centering": 0.01, "train.precision": "32"},
    "trl/sft": {
        "task.kind": "llm.sft", "data.batch.tokens": 4096, "optim.final": 0.1, "evaluate.every": "never",
        "data.train.0.path": "support/dialogues.jsonl", "optim.weight_decay": 0.0,
    },
    "trl/sft-lora": {
        "model.lora.rank": 32, "model.lora.dora": True, "task.loss.dynamic": True, "evaluate.every": 100,
        "data.train.0.split": "train", "data.validation.0.split": "test",
    },
    "trl/sft-qlora": {
        "model.quantization": "nf4", "model.lora.rank": 16, "data.train.1.weight": 0.5, "train.steps": 500,
        "task.neftune_alpha": 5,
    },
    "trl/mixture": {
        "task.kind": "llm.dpo", "task.loss.0.name": "apo_zero", "data.train.0.weight": 0.5, "model.kernels": "liger",
        "data.train.1.path": "support/more-preferences", "data.train.1.weight": 1.0, "optim.final": 0.1,
        "track.loggers": ("csv", "wandb"), "evaluate.every": "never",
    },
    "trl/mixer-qlora": {
        "task.kind": "llm.sft", "data.train.1.path": "support/forum", "data.train.1.weight": 0.25,
        "data.train.0.split": "train_sft", "data.validation.1.split": "test_sft", "optim.name": "adamw",
        "model.quantization": "nf4", "data.max_length": 2048, "data.batch.packing": False, "evaluate.every": "epoch",
    },
    "trl/dpo": {"task.kind": "llm.dpo", "task.precompute_reference": True, "optim.learning_rate": 5e-7},
    "trl/kto": {"task.kind": "llm.kto", "model.lora.alpha": 16, "task.undesirable_weight": 1.33},
    "trl/reward": {"task.kind": "llm.reward", "evaluate.every": 50, "data.max_length": 2048},
    "trl/grpo": {
        "task.loss": "dr_grpo", "task.scale": "none", "rollout.iterations": 2, "task.mask_truncated": True,
        "data.batch.examples": 1, "train.accumulate": 4, "rewards.0.kind": "number", "rewards.1.tags": ("think",),
        "rewards.3.function": "my_rewards:right_answer", "rollout.top_k": None,
    },
}  # fmt: skip


def at(recipe: Any, place: str) -> Any:
    for name in place.split("."):
        recipe = recipe[int(name)] if name.isdecimal() else getattr(recipe, name)
    return recipe


def test_all_files_have_expectations() -> None:
    assert EXPECTED.keys() == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_fields_mean_what_the_keys_meant(name: str) -> None:
    recipe = imported(name).recipe
    assert {place: at(recipe, place) for place in EXPECTED[name]} == EXPECTED[name]


def status(found: Imported, key: str) -> str:
    return next(line.status for line in found.lines if line.key == key)


def test_what_can_not_be_carried_over_is_named() -> None:
    assert status(imported("axolotl/lora-alpaca"), "load_in_8bit") == "unsupported"
    assert status(imported("axolotl/lora-alpaca"), "val_set_size") == "unsupported"
    assert status(imported("axolotl/lora-alpaca"), "evals_per_epoch") == "unsupported"
    assert status(imported("axolotl/grpo"), "trl.use_vllm") == "unsupported"
    assert status(imported("llama-factory/lora-sft"), "loraplus_lr_ratio") == "unsupported"
    assert status(imported("ms-swift/sft-lora"), "system") == "unsupported"
    assert status(imported("ms-swift/sft-lora"), "dataset[0]#500") == "unsupported"
    assert status(imported("ms-swift/qlora"), "(adapter)") == "unsupported"  # PEFT takes no PiSSA of 4 bits
    assert status(imported("ms-swift/grpo"), "reward_funcs[2]") == "unsupported"
    for key in ("plugins[0]", "datasets[0].roles", "special_tokens", "attention"):
        assert status(imported("axolotl/sft-plugins"), key) == "not needed"
    assert status(imported("axolotl/sft-plugins"), "datasets[0].name") == "unsupported"
    assert status(imported("trl/mixture"), "dataset_mixture.datasets[0].config") == "unsupported"
    assert status(imported("trl/mixture"), "chat_template") == "unsupported"
    assert status(imported("llama-factory/ppo"), "ppo_score_norm") == "unsupported"
    assert status(imported("trl/dpo"), "loss_type") == "unsupported"  # one of the three is no loss of pairs
    head = imported("axolotl/lora-alpaca").text().split("task:")[0]
    assert "# not carried over: load_in_8bit: " in head


def test_a_key_that_nobody_knows_does_not_vanish(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text((FILES / "axolotl/kto.yaml").read_text() + "flux_capacitor: 1.21\n")
    found = import_file(file)
    assert status(found, "flux_capacitor") == "unsupported"
    assert found.recipe is not None


def test_values_of_any_shape_are_told_of(tmp_path: Path) -> None:
    """No file of others ends in a traceback; what is not understood is named."""
    file = tmp_path / "a.yaml"
    file.write_text(
        'base_model: m\nsample_packing: [1]\nmax_grad_norm: much\nadam_beta1: {a: b}\n"key\\nof: two": 1\n'
        "datasets:\n- {path: json, data_files: [a.jsonl, b.jsonl], type: {field_instruction: instruction}}\n"
    )
    found = import_file(file)
    assert found.tree["data"]["train"] == ["a.jsonl", "b.jsonl"]
    assert found.tree["task"]["kind"] == "llm.sft"
    assert status(found, "max_grad_norm") == status(found, "adam_beta1") == "unsupported"
    assert "# not carried over: key of: two: " in found.text()
    assert reading.parse(found.text(), "the text") == found.tree


def test_an_interval_in_steps_counts_only_where_steps_were_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        (FILES / "llama-factory/pretrain.yaml").read_text()
        + "\neval_strategy: epoch\neval_steps: 7\nsave_strategy: epoch\n"
    )
    found = import_file(file)
    assert found.tree["evaluate"]["every"] == "epoch"
    assert found.tree["checkpoint"]["every"] is None
    assert status(found, "eval_steps") == status(found, "save_steps") == "not needed"


def test_secrets_of_a_file_are_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.yaml"
    file.write_text((FILES / "trl/kto.yaml").read_text() + "hub_token: hf_made_up_for_this\n")
    with pytest.raises(SystemExit):
        cli.main(["import", str(file), "--output", str(tmp_path / "new" / "recipe.yaml")])
    printed = capsys.readouterr().out
    assert "hub_token" in printed
    assert "made_up" not in printed + (tmp_path / "new" / "recipe.yaml").read_text()


def test_the_tools_defaults_are_carried_over() -> None:
    lines = [line.told for line in imported("llama-factory/lora-sft").lines if line.status == "default"]
    assert "model.lora.alpha: 32" in lines
    told = [line.told for line in imported("trl/kto").lines if line.status == "default"]
    assert "train.epochs: 3.0" not in told  # it is in the file
    assert "data.max_length: 1024" in told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("learning_rate: 1e-4\n", "can't tell which tool"),
        ("base_model: a\nstage: sft\n", "can't tell which tool"),
        ("model_name_or_path: a\ndataset_name: b\nbeta: 0.1\n", "can't tell which command"),
        ("- a\n", "not a mapping"),
        ("stage: mcts\ncutoff_len: 8\n", "not known here"),
        ("rlhf_type: mcts\ntrain_type: full\n", "not known here"),
        ("rl: ppo\nbase_model: a\n", "not known here"),
        ("a: [\n", "not valid YAML"),
    ],
)
def test_doubt_is_refused(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError, match=told):
        import_file(file)


def test_no_tool_knows_a_telling_key_of_another_one() -> None:
    for name, tool in TOOLS.items():
        assert tool.telling <= {key.split(".")[0] for key in tool.keys}
        others = {key for label, other in TOOLS.items() if label != name for key in other.keys}
        assert not tool.telling & others
        assert guess(dict.fromkeys(tool.telling, 1), "x") == name


def test_data_sets_of_llama_factory_are_looked_up(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    info = {"identity": {"file_name": "identity.json", "columns": {"prompt": "question"}}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    shutil.copy(FILES / "llama-factory/qlora-sft.yaml", tmp_path / "a.yaml")
    found = import_file(tmp_path / "a.yaml")
    assert found.tree["data"]["train"] == "data/identity.json"
    assert status(found, "dataset[identity].columns.prompt") == "unsupported"


def test_the_verb_writes_once_and_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, output = str(FILES / "trl/kto.yaml"), tmp_path / "recipe.yaml"
    with pytest.raises(SystemExit) as ended:
        cli.main(["import", file, "--output", str(output)])
    assert ended.value.code == 0
    assert "undesirable_weight" in capsys.readouterr().out
    assert reading.load(output).task.kind == "llm.kto"
    with pytest.raises(SystemExit) as ended:
        cli.main(["import", file, "--output", str(output)])
    assert ended.value.code == 2
    assert "not overwritten" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        cli.main(["import", str(FILES / "axolotl/kto.yaml"), "--strict", "--output", str(tmp_path / "b.yaml")])
    assert ended.value.code == 0  # nothing in it was lost
    with pytest.raises(SystemExit) as ended:
        cli.main(["import", str(FILES / "trl/sft.yaml"), "--strict", "--output", str(tmp_path / "c.yaml")])
    assert ended.value.code == 2  # its logger and its end token were


# ------------------------------------------------------------------------------------------------ on toy models

ASKED = "What is the sum of two and three?"


def rows(kind: str, numbers: range) -> list[dict[str, Any]]:
    """Rows of a kind, each about another number."""
    said = {
        "llm.sft": lambda n: {
            "messages": [{"role": "user", "content": f"{ASKED} {n}"}, {"role": "assistant", "content": f"It is {n}."}]
        },
        "llm.pretrain": lambda n: {"text": f"The sum of {n} and three and {n} is what it is, {n}. " * 9},
        "llm.dpo": lambda n: {"prompt": f"{ASKED} {n}", "chosen": f"It is {n}.", "rejected": f"No, {n}?"},
        "llm.kto": lambda n: {"prompt": f"{ASKED} {n}", "completion": f"It is {n}.", "label": n % 2 == 0},
        "llm.grpo": lambda n: {"prompt": f"{ASKED} {n}", "answer": str(n)},
    }
    same = {"llm.reward": "llm.dpo", "llm.ppo": "llm.grpo"}
    return [said[same.get(kind, kind)](n) for n in numbers]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama, rows of every kind, and a module with reward functions."""
    from luthier.modalities.llm.arithmetic.model import make_model

    folder = tmp_path_factory.mktemp("toy")
    make_model(folder / "model", [ASKED] * 8)
    for kind in ("llm.sft", "llm.pretrain", "llm.dpo", "llm.kto", "llm.reward", "llm.grpo", "llm.ppo"):
        for name, numbers in (("train", range(24)), ("validation", range(100, 108))):
            lines = "".join(json.dumps(row) + "\n" for row in rows(kind, numbers))
            (folder / f"{kind}-{name}.jsonl").write_text(lines)
    (folder / "my_rewards.py").write_text(
        "def right_answer(answers):\n    return [1.0 for _ in answers]\n\n\nshort_answer = right_answer\n"
    )
    return folder


def toy_recipe(name: str, toy: Path, output: Path) -> Any:
    """The recipe with the model and data of the toy, on this machine."""
    tree = imported(name).tree
    kind = tree["task"]["kind"]
    file = str(toy / f"{kind}-train.jsonl")
    changes = [
        f"model.path={toy / 'model'}", f"data.train={file}", "data.max_length=200", "data.workers=0",
        "train.accelerator=cpu", "train.threads=1", "train.strategy=auto", f"output={output}",
    ]  # fmt: skip
    if "validation" in tree["data"]:
        changes.append(f"data.validation={toy / kind}-validation.jsonl")
    if tree["model"].get("kernels"):
        changes.append("model.kernels=torch")  # Liger's need a CUDA device
    if tree["model"].get("lora", {}).get("modules_to_save"):
        changes.append("model.lora.modules_to_save=[]")  # the toy's tables are tied
    if tree["data"].get("batch", {}).get("packing"):
        changes.append("data.batch.tokens=400")
    if tree["optim"].get("warmup", 0) >= 1:
        changes.append("optim.warmup=0.1")  # the toy's training is shorter than the warm-up
    if kind == "llm.grpo":
        changes += ["rollout.max_new_tokens=8", "rollout.num_generations=2"]
    if kind == "llm.ppo":
        changes += ["rollout.max_new_tokens=8", "rewards=[{kind: number}]"]  # there is no reward model
    if tree.get("train", {}).get("precision") == "16-mixed":
        changes.append("train.precision='32'")  # 16-bit floats with scaled gradients need a GPU
    return reading.build(reading.override(tree, changes), name)


QUICK = ("axolotl/kto",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_the_recipe_passes_the_check_on_a_toy(
    name: str, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.syspath_prepend(toy)
    passed = check(toy_recipe(name, toy, tmp_path / "run"), fast=True)
    lines = capsys.readouterr().out.splitlines()
    assert passed, "\n".join(
        line for at, line in enumerate(lines) if any("fail" in near for near in lines[max(0, at - 8) : at + 1])
    )
