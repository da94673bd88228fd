"""Axolotl's keys (docs.axolotl.ai, config reference)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .axolotl_data import datasets, template
from .draft import Draft, Rule, is_off
from .language import (
    EIGHT_BITS,
    GRPO,
    LORA,
    PAIRS,
    four_bits,
    jinja,
    need,
    online_loss,
    packed,
    rewards,
    rollouts,
    unknown,
    with_lora,
)
from .rules import by_kind, choice, flag, listed, missing, needless, number, only_with, to, unless_off, whole
from .trainer import OPTIMIZERS, SCHEDULES, TRAINER, tracker

TELLING = frozenset(
    {
        "base_model", "micro_batch_size", "sequence_len", "sample_packing", "val_set_size", "adapter", "num_epochs",
        "dataset_prepared_path", "lora_target_linear", "pretraining_dataset", "evals_per_epoch", "saves_per_epoch",
        "rl", "chat_template_jinja", "lora_model_dir", "special_tokens", "test_datasets",
    }
)  # fmt: skip

_PAIRED = {"dpo": "sigmoid", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo", "cpo": "cpo"}


def kind(given: Mapping[str, Any], where: str) -> str:
    wanted = given.get("rl")
    if wanted in _PAIRED:
        return "llm.dpo"
    if not is_off(wanted):
        if wanted not in ("kto", "grpo"):
            raise unknown(f"rl: {wanted}", where, f"one of {', '.join((*_PAIRED, 'kto', 'grpo'))}")
        return f"llm.{wanted}"
    if given.get("reward_model"):
        return "llm.reward"
    if given.get("process_reward_model"):
        return "llm.prm"
    types = [one.get("type") for one in given.get("datasets") or [] if isinstance(one, Mapping)]
    plain = bool(types) and all(one == "completion" for one in types)
    return "llm.pretrain" if given.get("pretraining_dataset") or plain else "llm.sft"


def _share(draft: Draft, key: str, value: Any) -> None:
    if is_off(value):
        draft.say(key, value, "not needed", "nothing is taken off")
    else:
        draft.say(key, value, "unsupported", "cut a validation file off, and name it: data.validation")


def _each_epoch(place: str) -> Rule:
    def rule(draft: Draft, key: str, value: Any) -> None:
        if is_off(value):
            draft.mapped(key, value, {place: "never" if place == "evaluate.every" else None})
        elif number(value) == 1 and place == "evaluate.every":
            draft.mapped(key, value, {place: "epoch"})
        elif number(value) == 1:
            draft.mapped(key, value, {place: None}, "saved after each evaluation and at the end")
        else:
            draft.say(key, value, "unsupported", f"set {place} to a number of optimizer steps")

    return rule


def _special(draft: Draft, key: str, value: Any) -> None:
    if set(value) <= {"pad_token"}:
        draft.say(key, value, "not needed", "nothing is padded")
    else:
        draft.say(key, value, "unsupported", "set it in the tokenizer and save that; new ones: model.new_tokens")


def _plugins(draft: Draft, key: str, value: Any) -> None:
    for at, one in enumerate(listed(value)):
        if "liger" in one:
            draft.mapped(f"{key}[{at}]", one, {"model.kernels": "liger"})
        elif "cut_cross_entropy" in one:
            draft.say(f"{key}[{at}]", one, "not needed", "logits of a whole batch are never in memory")
        else:
            draft.say(f"{key}[{at}]", one, "unsupported", "plugins change what is trained; this one is not known")


def _rl_loss(draft: Draft, key: str, value: Any) -> None:
    if draft.kind == "llm.dpo":
        draft.mapped(key, value, {"task.kind": "llm.dpo", "task.loss": _PAIRED[value]})
    else:
        draft.mapped(key, value, {"task.kind": draft.kind})


def _precision(name: str) -> Rule:
    return lambda draft, key, value: (
        draft.say(key, value, "not needed", "off")
        if is_off(value)
        else draft.mapped(key, value, {"train.precision": name})
    )


_BETA = by_kind(
    {"llm.dpo": to("task.beta", number), "llm.kto": to("task.beta", number), "llm.grpo": to("task.kl.weight", number)}
)
_FASTER = needless("attention kernels are chosen by what the device has")
_TRACKER = needless("a setting of a tracker")

KEYS: dict[str, Rule] = {
    **TRAINER,
    **{f"trl.{name}": rule for name, rule in GRPO.items()},
    "trl.beta": _BETA,
    "trl.loss_type": online_loss,
    "trl.reward_funcs": rewards,
    **{
        f"trl.vllm_{name}": needless("only with use_vllm")
        for name in (
            "device",
            "dtype",
            "gpu_memory_utilization",
            "max_model_len",
            "server_host",
            "server_port",
            "server_timeout",
            "enable_prefix_caching",
            "mode",
            "tensor_parallel_size",
        )
    },
    **{
        f"vllm.{name}": needless("completions are drawn in the trainer's own process")
        for name in (
            "host",
            "port",
            "tensor_parallel_size",
            "gpu_memory_utilization",
            "dtype",
            "max_model_len",
            "enable_prefix_caching",
            "data_parallel_size",
        )
    },
    "base_model": to("model.path"),
    "tokenizer_config": missing("the tokenizer is the one in model.path"),
    "model_type": needless("told by the model"),
    "tokenizer_type": needless("told by the model"),
    "base_model_config": needless("the model's own"),
    "is_llama_derived_model": needless("told by the model"),
    "revision_of_model": missing("fetch that revision, and give its folder as model.path"),
    "trust_remote_code": to("model.trust_remote_code", flag),
    "strict": needless("keys that are not known are always refused"),
    "load_in_4bit": unless_off(four_bits),
    "load_in_8bit": EIGHT_BITS,
    "bnb_config_kwargs": missing("4 bits are always NormalFloat, quantised twice"),
    "adapter": lambda draft, key, value: draft.say(
        key,
        value,
        "mapped" if value in ("lora", "qlora") else "unsupported",
        "model.lora" if value in ("lora", "qlora") else "adapters here are LoRA's: adapter: lora",
    ),
    "lora_r": only_with("adapter", LORA["rank"]),
    "lora_alpha": only_with("adapter", LORA["alpha"]),
    "lora_dropout": only_with("adapter", LORA["dropout"]),
    "lora_target_modules": only_with("adapter", unless_off(LORA["target"])),
    "lora_target_linear": only_with("adapter", unless_off(to("model.lora.target_modules", lambda value: "all-linear"))),
    "lora_modules_to_save": only_with("adapter", LORA["save"]),
    "peft_use_dora": only_with("adapter", LORA["dora"]),
    "peft_use_rslora": only_with("adapter", LORA["rslora"]),
    "lora_fan_in_fan_out": needless("told by the layer"),
    "lora_on_cpu": needless("a setting of its own merge"),
    "lora_model_dir": unless_off(to("model.adapter")),
    "lora_mlp_kernel": _FASTER,
    "lora_qkv_kernel": _FASTER,
    "lora_o_kernel": _FASTER,
    "peft_layers_to_transform": missing("model.lora.target_modules takes a regular expression of names"),
    "loraplus_lr_ratio": missing("optim.groups gives parameters a rate of their own"),
    "loraplus_lr_embedding": needless("only with loraplus_lr_ratio"),
    "relora": missing("one adapter is trained"),
    "lisa_n_layers": missing("all layers are trained"),
    "unfrozen_parameters": missing("train an adapter, or all of the model"),
    "datasets": datasets("data.train"),
    "test_datasets": datasets("data.validation"),
    "pretraining_dataset": datasets("data.train"),
    "val_set_size": _share,
    "dataset_prepared_path": needless("tokens are made anew at each start"),
    "dataset_processes": needless("read in threads"),
    "skip_prepare_dataset": needless("tokens are made anew at each start"),
    "shuffle_merged_datasets": needless("always shuffled"),
    "dataset_exact_deduplication": missing("take doubles out of the data before"),
    "push_dataset_to_hub": missing("nothing is uploaded in a run"),
    "hf_use_auth_token": needless("log in with `hf auth login`"),
    "streaming": to("data.streaming", flag),
    "streaming_multipack_buffer_size": to("data.buffer", whole),
    "pretrain_multipack_buffer_size": to("data.buffer", whole),
    "pretrain_multipack_attn": needless("no document sees another"),
    "chat_template": template,
    "chat_template_jinja": unless_off(jinja),
    "default_system_message": missing("write it into the rows"),
    "eot_tokens": needless("ends of turns are found in the template"),
    "special_tokens": unless_off(_special, "none"),
    "tokens": unless_off(to("model.new_tokens", listed), "none"),
    "added_tokens_overrides": missing("model.new_tokens"),
    "resize_token_embeddings_to_32x": needless("the vocabulary grows by what is new"),
    "train_on_inputs": unless_off(
        by_kind({"llm.sft": to("data.roles", lambda value: ["system", "user", "assistant", "tool"])})
    ),
    "sequence_len": to("data.max_length", whole),
    "min_sample_len": missing("leave short rows out of the data"),
    "excess_length_strategy": needless("data.too_long says what becomes of long examples"),
    "sample_packing": to("data.batch.packing", flag),
    "eval_sample_packing": needless("evaluation never pads"),
    "pad_to_sequence_len": needless("nothing is padded"),
    "batch_flattening": needless("nothing is padded"),
    "sample_packing_group_size": needless("packed over the epoch"),
    "sample_packing_bin_size": needless("packed over the epoch"),
    "sample_packing_sequentially": missing("batches are packed in random order"),
    "pretraining_sample_concatenation": needless("texts stand one after another in blocks"),
    "curriculum_sampling": missing("examples are shuffled"),
    "micro_batch_size": to("data.batch.examples", whole),
    "eval_batch_size": to("evaluate.batch", whole),
    "batch_size": missing("set train.accumulate to batch_size / micro_batch_size / devices"),
    "num_epochs": TRAINER["num_train_epochs"],
    "optimizer": choice("optim.name", OPTIMIZERS),
    "lr_scheduler": choice("optim.schedule", SCHEDULES),
    "cosine_min_lr_ratio": unless_off(to("optim.final", number)),
    "cosine_constant_lr_ratio": missing("the cosine reaches its end with the last step"),
    "embedding_lr": missing("optim.groups gives parameters a rate of their own"),
    "embedding_lr_scale": missing("optim.groups gives parameters a rate of their own"),
    "lr_groups": missing("optim.groups gives parameters a rate of their own"),
    "bf16": _precision("bf16-mixed"),
    "fp16": _precision("16-mixed"),
    "bfloat16": _precision("bf16-true"),
    "float16": missing("train.precision: 16-mixed, or bf16-true"),
    "fp8": missing("train.precision: bf16-mixed"),
    "flash_attention": _FASTER,
    "sdp_attention": _FASTER,
    "xformers_attention": _FASTER,
    "flex_attention": _FASTER,
    "eager_attention": _FASTER,
    "attn_implementation": _FASTER,
    "attention": _FASTER,
    "s2_attention": missing("attention is as the model has it"),
    **dict.fromkeys(
        (
            "flash_attn_cross_entropy",
            "flash_attn_rms_norm",
            "flash_attn_fuse_qkv",
            "flash_attn_fuse_mlp",
            "unsloth_cross_entropy_loss",
            "unsloth_lora_mlp",
            "unsloth_lora_qkv",
            "unsloth_lora_o",
        ),
        _FASTER,
    ),
    "plugins": _plugins,
    "liger_rope": needless("said by model.kernels"),
    "liger_rms_norm": needless("said by model.kernels"),
    "liger_glu_activation": needless("said by model.kernels"),
    "liger_layer_norm": needless("said by model.kernels"),
    "liger_fused_linear_cross_entropy": needless("logits of a whole batch are never in memory"),
    "sequence_parallel_degree": missing("train.strategy: fsdp2+tp cuts layers"),
    "context_parallel_size": missing("train.strategy: fsdp2+tp cuts layers"),
    "tensor_parallel_size": unless_off(to("train.tensor_parallel", whole)),
    "evals_per_epoch": _each_epoch("evaluate.every"),
    "saves_per_epoch": _each_epoch("checkpoint.every"),
    "save_first_step": needless("`luthier check` saves and reloads a checkpoint before the run"),
    "eval_table_size": needless("evaluate.samples are kept for reading"),
    "eval_max_new_tokens": needless("evaluate.generate.max_new_tokens, where answers are generated"),
    "do_bench_eval": missing("evaluate.harness"),
    "early_stopping_patience": unless_off(to("evaluate.patience", whole)),
    "auto_resume_from_checkpoints": needless("the same command goes on where the run stopped"),
    "loss_watchdog_threshold": missing("train.spike_factor looks for loss spikes"),
    "loss_watchdog_patience": needless("see train.max_skipped"),
    "gc_steps": needless("a setting that changes no result"),
    "debug": needless("train.debug, and --debug"),
    "use_tensorboard": unless_off(tracker("tensorboard")),
    **dict.fromkeys(
        (
            "wandb_entity",
            "wandb_watch",
            "wandb_name",
            "wandb_run_id",
            "wandb_log_model",
            "wandb_mode",
            "mlflow_tracking_uri",
            "mlflow_run_name",
            "comet_project_name",
            "local_rank",
        ),
        _TRACKER,
    ),
    "use_wandb": unless_off(tracker("wandb")),
    "use_mlflow": unless_off(tracker("mlflow")),
    "wandb_project": unless_off(tracker("wandb")),  # a name there switches the tracker on
    "mlflow_experiment_name": unless_off(tracker("mlflow")),
    "profiler_steps": missing("train.debug looks inside"),
    "local_files_only": needless("set HF_HUB_OFFLINE=1"),
    "rl": unless_off(_rl_loss, "none"),
    "rl_beta": _BETA,
    "dpo_beta": _BETA,
    "orpo_alpha": by_kind({"llm.dpo": to("task.beta", number)}),
    "simpo_gamma": by_kind({"llm.dpo": to("task.simpo_gamma", number)}),
    "cpo_alpha": by_kind({"llm.dpo": to("task.sft_weight", number)}),
    "rpo_alpha": by_kind({"llm.dpo": unless_off(to("task.sft_weight", number))}),
    "dpo_label_smoothing": by_kind({"llm.dpo": unless_off(to("task.label_smoothing", number))}),
    "dpo_loss_type": by_kind({"llm.dpo": choice("task.loss", {one: one for one in PAIRS})}),
    "dpo_use_weighting": missing("pairs all weigh the same"),
    "precompute_ref_log_probs": by_kind({"llm.dpo": to("task.precompute_reference", flag)}),
    "kto_desirable_weight": by_kind({"llm.kto": to("task.desirable_weight", number)}),
    "kto_undesirable_weight": by_kind({"llm.kto": to("task.undesirable_weight", number)}),
    "max_prompt_len": needless("data.max_length bounds a prompt with its answer"),
    "reward_model": unless_off(to("task.kind", lambda value: "llm.reward")),
    "process_reward_model": unless_off(to("task.kind", lambda value: "llm.prm")),
    "num_labels": needless("a reward is one number, a step right or wrong"),
    "center_rewards_coefficient": by_kind({"llm.reward": unless_off(to("task.centering", number))}),
}
"""What becomes of each key."""


def settle(draft: Draft) -> None:
    draft.default("optim.weight_decay", 0.0)
    draft.default("optim.schedule", "cosine")
    if draft.get("train.steps") is None:
        draft.default("train.epochs", 1.0)
    draft.default("data.batch.examples", 1)
    draft.default("data.max_length", 512)
    draft.default("optim.warmup", 0.03)
    if "bf16" not in draft.given and "fp16" not in draft.given:
        draft.default("train.precision", "bf16-mixed")
    if "pretraining_dataset" in draft.given:
        draft.default("data.streaming", True)
    if draft.kind == "llm.grpo":  # as TRL, which trains there
        draft.default("task.loss", "dapo")
        draft.default("task.clip_high", draft.get("task.clip_low", 0.2))
    with_lora(draft, draft.has("adapter") and not draft.has("lora_model_dir"), {"dropout": 0.0})
    packed(draft)
    rollouts(draft)
    need(draft, "data.train", "no data set is named")
