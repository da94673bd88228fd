"""LLaMA-Factory's keys (llamafactory-cli train FILE)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .draft import Draft, Rule
from .language import (
    EIGHT_BITS,
    GRPO,
    LORA,
    four_bits,
    lora_only,
    losses,
    need,
    packed,
    rewarded,
    rollouts,
    sources,
    unknown,
    with_lora,
)
from .rules import by_kind, flag, listed, missing, needless, number, same, to, unless_off, whole
from .trainer import TRAINER, tracker

TELLING = frozenset(
    {
        "stage", "finetuning_type", "cutoff_len", "dataset_dir", "lora_target", "pref_beta", "pref_loss", "pref_ftx",
        "val_size", "plot_loss", "quantization_bit", "quantization_method", "neat_packing", "flash_attn",
        "mask_history", "overwrite_cache", "adapter_name_or_path", "enable_liger_kernel", "media_dir",
    }
)  # fmt: skip

_STAGES = {
    "pt": "llm.pretrain", "sft": "llm.sft", "rm": "llm.reward", "dpo": "llm.dpo", "kto": "llm.kto", "ppo": "llm.ppo",
}  # fmt: skip


def kind(given: Mapping[str, Any], where: str) -> str:
    stage = given.get("stage", "sft")
    if stage not in _STAGES:
        raise unknown(f"stage: {stage}", where, f"one of {', '.join(_STAGES)}")
    return _STAGES[stage]


def _datasets(place: str) -> Rule:
    """Names of sets that `dataset_info.json` of the data folder describes."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        folder = Path(str(draft.given.get("dataset_dir", "data")))
        known = _described(Path(draft.where).parent / folder) or _described(folder)
        found = []
        for name in listed(value):
            about = known.get(name, {})
            path = about.get("file_name") or about.get("hf_hub_url")
            if path is None:
                draft.say(
                    f"{key}[{name}]", name, "unsupported",
                    f"no {folder}/dataset_info.json says which file it is; set {place} to that file",
                )  # fmt: skip
                found.append(name)
                continue
            found.append(str(folder / path) if about.get("file_name") else path)
            draft.say(f"{key}[{name}]", name, "mapped", f"{place}: {found[-1]}")
            for inner, named in (about.get("columns") or {}).items():
                if named != _COLUMNS.get(inner, named):
                    told = f"rename the column {named} to {_COLUMNS[inner]}"
                    draft.say(f"{key}[{name}].columns.{inner}", named, "unsupported", told)
        sources(draft, place, found)

    return rule


_COLUMNS = {
    "prompt": "instruction", "query": "input", "response": "output", "system": "system", "history": "history",
    "chosen": "chosen", "rejected": "rejected", "kto_tag": "label", "tools": "tools",
}  # fmt: skip


def _described(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def _tuning(draft: Draft, key: str, value: Any) -> None:
    if value == "lora":
        draft.say(key, value, "mapped", "model.lora")
    elif value == "full":
        draft.say(key, value, "not needed", "all weights are trained where there is no model.lora")
    else:
        draft.say(key, value, "unsupported", "train an adapter (model.lora), or all weights")


def _template(draft: Draft, key: str, value: Any) -> None:
    if value in ("default", "empty", "alpaca", "vicuna"):
        draft.say(
            key, value, "unsupported", "the tokenizer's own template is used; for another, data.chat_template: FILE"
        )
    else:
        draft.say(key, value, "not needed", "the model's own template is used; `luthier inspect` shows it")


def _bits(draft: Draft, key: str, value: Any) -> None:
    (four_bits if whole(value) == 4 else EIGHT_BITS)(draft, key, value)


_TRACKER = needless("a setting of a tracker")
_LAYERS = missing("train an adapter (model.lora), or all weights")
_WHOLE_GRADIENT = missing("optim.name: adamw_8bit needs less memory too")

KEYS: dict[str, Rule] = {
    **TRAINER,
    "model_name_or_path": to("model.path"),
    "adapter_name_or_path": unless_off(to("model.adapter", lambda value: listed(value)[0])),
    "create_new_adapter": missing(
        "merge the first adapter (`luthier export --to merged`), and train a new one on that"
    ),
    "trust_remote_code": to("model.trust_remote_code", flag),
    "model_revision": same("main", "fetch that revision, and give its folder as model.path"),
    "cache_dir": needless("set HF_HOME"),
    "use_fast_tokenizer": needless("always a fast one"),
    "hf_hub_token": missing("never in a file: log in with `hf auth login`"),
    "low_cpu_mem_usage": needless("done without being asked"),
    "device_map": needless("train.strategy"),
    "resize_vocab": needless("the vocabulary grows by what is new"),
    "add_tokens": missing("model.new_tokens adds special tokens"),
    "add_special_tokens": unless_off(to("model.new_tokens", listed)),
    "new_special_tokens": unless_off(to("model.new_tokens", listed)),
    "split_special_tokens": needless("data.control_tokens says what becomes of them"),
    "rope_scaling": missing("set it in the model's config.json"),
    "flash_attn": needless("chosen by the device"),
    "shift_attn": missing("attention is as the model has it"),
    "mixture_of_depths": missing("the model is as it is"),
    "use_unsloth": missing("model.kernels: liger"),
    "use_unsloth_gc": missing("train.gradient_checkpointing"),
    "enable_liger_kernel": unless_off(to("model.kernels", lambda value: "liger")),
    "moe_aux_loss_coef": missing("router_aux_loss_coef in the model's config.json"),
    "disable_gradient_checkpointing": lambda draft, key, value: draft.mapped(
        key, value, {"train.gradient_checkpointing": not value}
    ),
    "use_reentrant_gc": needless("always non-reentrant"),
    "upcast_layernorm": needless("by precision"),
    "upcast_lmhead_output": needless("the loss is computed in 32 bits"),
    "quantization_bit": unless_off(_bits),
    "quantization_method": same("bitsandbytes", "model.quantization: nf4, by bitsandbytes"),
    "quantization_type": same("nf4", "4 bits are NormalFloat: nf4"),
    "double_quantization": needless("always"),
    "quantization_device_map": needless("train.strategy"),
    "image_max_pixels": missing("texts only"),
    "image_min_pixels": missing("texts only"),
    "video_max_pixels": missing("texts only"),
    "media_dir": missing("texts only"),
    "freeze_vision_tower": missing("texts only"),
    "freeze_multi_modal_projector": missing("texts only"),
    "infer_backend": needless("nothing is served in a run"),
    "infer_dtype": needless("nothing is served in a run"),
    "stage": lambda draft, key, value: draft.mapped(key, value, {"task.kind": draft.kind}),
    "finetuning_type": _tuning,
    "freeze_trainable_layers": _LAYERS,
    "freeze_trainable_modules": _LAYERS,
    "freeze_extra_modules": _LAYERS,
    "use_llama_pro": _LAYERS,
    "lora_rank": lora_only(LORA["rank"], "finetuning_type"),
    "lora_alpha": lora_only(unless_off(LORA["alpha"]), "finetuning_type"),
    "lora_dropout": lora_only(LORA["dropout"], "finetuning_type"),
    "lora_target": lora_only(LORA["target"], "finetuning_type"),
    "additional_target": lora_only(LORA["save"], "finetuning_type"),
    "use_dora": lora_only(LORA["dora"], "finetuning_type"),
    "use_rslora": lora_only(LORA["rslora"], "finetuning_type"),
    "pissa_init": lora_only(unless_off(to("model.lora.init", lambda value: "pissa")), "finetuning_type"),
    "pissa_iter": needless("PiSSA by the whole decomposition"),
    "pissa_convert": missing("`luthier export --to merged` gives a whole model"),
    "loraplus_lr_ratio": missing("optim.groups gives parameters a rate of their own"),
    "loraplus_lr_embedding": needless("only with loraplus_lr_ratio"),
    "use_galore": _WHOLE_GRADIENT,
    "use_apollo": _WHOLE_GRADIENT,
    "use_badam": _WHOLE_GRADIENT,
    "use_muon": _WHOLE_GRADIENT,
    "use_adam_mini": _WHOLE_GRADIENT,
    **{
        f"{name}_{end}": needless(f"only with use_{name}")
        for name, ends in {
            "galore": ("layerwise", "target", "rank", "scale", "update_interval", "proj_type"),
            "apollo": ("layerwise", "target", "rank", "scale", "update_interval", "scale_type", "proj", "proj_type"),
            "badam": ("mode", "switch_mode", "switch_interval", "verbose", "start_block", "update_ratio"),
        }.items()
        for end in ends
    },
    "use_dft_loss": unless_off(to("task.loss.dynamic", flag)),
    "dft_loss": unless_off(to("task.loss.dynamic", flag)),
    "use_eaft_loss": missing("task.loss.dynamic weighs tokens by their probability"),
    "compute_accuracy": needless("accuracy is always computed"),
    "plot_loss": needless("curves.csv, and `luthier report`"),
    "include_effective_tokens_per_second": needless("speed is always logged"),
    "pure_bf16": unless_off(lambda draft, key, value: draft.mapped(key, value, {"train.precision": "bf16-true"})),
    "early_stopping_steps": unless_off(to("evaluate.patience", whole)),
    "dataset": _datasets("data.train"),
    "eval_dataset": _datasets("data.validation"),
    "dataset_dir": needless("said by the paths of the data"),
    "template": _template,
    "cutoff_len": to("data.max_length", whole),
    "train_on_prompt": unless_off(
        by_kind({"llm.sft": to("data.roles", lambda value: ["system", "user", "assistant", "tool"])})
    ),
    "mask_history": unless_off(by_kind({"llm.sft": to("data.turns", lambda value: "last")})),
    "default_system": missing("write it into the rows"),
    "enable_thinking": missing("chat_template_kwargs in the rows"),
    "tool_format": needless("the template writes tools"),
    "efficient_eos": needless("ends of turns are learned"),
    "streaming": to("data.streaming", flag),
    "buffer_size": to("data.buffer", whole),
    "mix_strategy": lambda draft, key, value: (
        draft.say(key, value, "not needed", "as here: each row once")
        if value == "concat"
        else draft.say(key, value, "unsupported", "give data sets weights: data.train: [{path, weight}]")
    ),
    "interleave_probs": missing("give data sets weights: data.train: [{path, weight}]"),
    "overwrite_cache": needless("tokens are made anew at each start"),
    "preprocessing_batch_size": needless("read in threads"),
    "preprocessing_num_workers": needless("read in threads"),
    "tokenized_path": missing("tokens are made anew at each start"),
    "max_samples": missing("give data sets a weight below 1, or shorten the file"),
    "eval_num_beams": missing("evaluate.generate.num_beams, where answers are generated"),
    "ignore_pad_token_for_loss": needless("nothing is padded"),
    "val_size": missing("cut a validation file off, and name it: data.validation"),
    "eval_on_each_dataset": needless("metrics come by source too"),
    "packing": unless_off(to("data.batch.packing", flag)),
    "neat_packing": unless_off(to("data.batch.packing", flag)),
    "predict_with_generate": missing("evaluate.generate lets the model answer"),
    "generation_max_length": missing("evaluate.generate.max_new_tokens"),
    "max_new_tokens": lambda draft, key, value: (
        draft.mapped(key, value, {"rollout.max_new_tokens": whole(value)})
        if draft.kind == "llm.ppo"
        else draft.say(key, value, "unsupported", "evaluate.generate.max_new_tokens")
    ),
    "top_p": by_kind({"llm.ppo": GRPO["top_p"]}, "only when it generates"),
    "temperature": by_kind({"llm.ppo": GRPO["temperature"]}, "only when it generates"),
    "do_sample": needless("only when it generates"),
    "pref_beta": by_kind({"llm.dpo": to("task.beta", number), "llm.kto": to("task.beta", number)}),
    "pref_loss": by_kind({"llm.dpo": losses}),
    "pref_ftx": by_kind({"llm.dpo": unless_off(to("task.sft_weight", number))}),
    "pref_bco_weight": missing("task.loss: [{name: sigmoid}, {name: bco_pair, weight: ...}]"),
    "dpo_label_smoothing": by_kind({"llm.dpo": unless_off(to("task.label_smoothing", number))}),
    "simpo_gamma": by_kind({"llm.dpo": to("task.simpo_gamma", number)}),
    "ld_alpha": missing("task.loss has no such weight"),
    "kto_chosen_weight": by_kind({"llm.kto": to("task.desirable_weight", number)}),
    "kto_rejected_weight": by_kind({"llm.kto": to("task.undesirable_weight", number)}),
    "ref_model": by_kind({"llm.dpo": unless_off(to("model.reference")), "llm.kto": unless_off(to("model.reference"))}),
    "ref_model_adapters": missing("merge it, and name the whole model: model.reference"),
    "ref_model_quantization_bit": needless("with an adapter the reference is the base under it"),
    "use_swanlab": unless_off(tracker("swanlab")),
    "ppo_epochs": by_kind({"llm.ppo": to("rollout.iterations", whole)}),
    "ppo_buffer_size": by_kind({"llm.ppo": to("rollout.steps", whole)}),
    "ppo_target": by_kind({"llm.ppo": missing("the KL's weight stays as it is: task.kl.weight")}),
    "ppo_score_norm": by_kind({"llm.ppo": missing("rewards are taken as they are")}),
    "ppo_whiten_rewards": by_kind({"llm.ppo": missing("task.whiten gives advantages, not rewards, deviation 1")}),
    "reward_model": by_kind({"llm.ppo": rewarded}),
    "reward_model_type": by_kind({"llm.ppo": same("full", "a reward model is a whole one; merge its adapter")}),
    "top_k": by_kind({"llm.ppo": GRPO["top_k"]}),
    "ray_run_name": missing("several nodes: torchrun or SLURM"),
    **dict.fromkeys(
        (
            "swanlab_project",
            "swanlab_workspace",
            "swanlab_run_name",
            "swanlab_mode",
            "swanlab_api_key",
            "swanlab_logdir",
        ),
        _TRACKER,
    ),
}
"""What becomes of each key."""


def settle(draft: Draft) -> None:
    if "learning_rate" not in draft.given:
        draft.default("optim.learning_rate", 5e-5)
    draft.default("optim.weight_decay", 0.0)
    draft.default("optim.warmup", 0)
    if "disable_gradient_checkpointing" not in draft.given and "gradient_checkpointing" not in draft.given:
        draft.default("train.gradient_checkpointing", True)
    if draft.get("train.steps") is None:
        draft.default("train.epochs", 3.0)
    if draft.kind == "llm.pretrain":
        draft.drop("data.batch.packing")  # its blocks are always full
    adapts = draft.given.get("finetuning_type", "lora") == "lora" and not draft.has("adapter_name_or_path")
    rank = draft.get("model.lora.rank", 8)
    with_lora(draft, adapts, {"rank": 8, "alpha": rank * 2, "target_modules": "all-linear"})
    packed(draft)
    if draft.kind == "llm.ppo":
        _settle_ppo(draft)
    rollouts(draft)
    need(draft, "data.train", "no data set is named")


def _settle_ppo(draft: Draft) -> None:
    """The tool's defaults of PPO, and how it generates."""
    own = {"num_generations": 1, "iterations": 4, "max_new_tokens": 1024, "temperature": 0.95, "top_p": 0.7}
    for name, value in own.items():
        draft.default(f"rollout.{name}", value)
    if "top_k" not in draft.given:
        draft.default("rollout.top_k", 50)
    if "reward_model" in draft.given and "reward_model_type" not in draft.given:
        draft.say("(not given)", None, "unsupported", "reward_model_type is lora: merge that adapter; models are whole")
