"""ms-swift's keys (swift sft --config FILE, swift pt, swift rlhf)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .draft import Draft, Rule, is_off
from .language import (
    BETA,
    EIGHT_BITS,
    GRPO,
    LORA,
    PPO,
    four_bits,
    lora_only,
    losses,
    need,
    online_loss,
    packed,
    rewarded,
    rewards,
    rollouts,
    sources,
    targets,
    unknown,
    with_lora,
)
from .rules import by_kind, flag, listed, missing, needless, number, same, to, unless_off, whole
from .trainer import TRAINER

TELLING = frozenset(
    {
        "train_type", "tuner_type", "rlhf_type", "tuner_backend", "model", "val_dataset", "split_dataset_ratio",
        "quant_bits", "quant_method", "target_modules", "loss_scale", "attn_impl", "truncation_strategy",
        "lazy_tokenize", "use_hf", "cached_dataset", "packing_length", "sft_type", "model_id_or_path",
    }
)  # fmt: skip

_TYPES = {
    "dpo": "llm.dpo", "orpo": "llm.dpo", "simpo": "llm.dpo", "cpo": "llm.dpo", "kto": "llm.kto", "rm": "llm.reward",
    "grpo": "llm.grpo", "ppo": "llm.ppo", "gkd": "llm.distill",
}  # fmt: skip


def kind(given: Mapping[str, Any], where: str) -> str:
    """`rlhf_type` says it; without one the command was `swift sft`, or `swift pt`, which the file doesn't say."""
    wanted = given.get("rlhf_type")
    if wanted is not None and wanted not in _TYPES:
        raise unknown(f"rlhf_type: {wanted}", where, f"one of {', '.join(_TYPES)}")
    if given.get("task_type") in ("embedding", "reranker", "generative_reranker"):
        do = "see `luthier recipes show embedding/bi-encoder` and embedding/reranker"
        raise unknown(f"task_type: {given['task_type']}", where, "a language model", do)
    if given.get("task_type") == "seq_cls":
        return "llm.reward"
    return _TYPES[wanted] if wanted else "llm.sft"


def _datasets(place: str) -> Rule:
    """`path_or_id:subset#number` of each set."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        found = []
        for at, one in enumerate([value] if isinstance(value, str) else value):
            parts = re.fullmatch(r"(?:(?:ms|hf|HF|MS)::)?(.+?)(?::([\w/-]+))?(?:#(\d+))?", str(one))
            assert parts is not None  # anything has a first part
            path, subset, number_ = parts.groups()
            found.append(path)
            draft.say(f"{key}[{at}]", one, "mapped", f"{place}: {path}")
            if subset:
                draft.say(f"{key}[{at}]:{subset}", one, "unsupported", "save the subset as a file, and name that")
            if number_:
                draft.say(f"{key}[{at}]#{number_}", one, "unsupported", "give the set a weight: {path, weight}")
        sources(draft, place, found)

    return rule


def _tuning(draft: Draft, key: str, value: Any) -> None:
    if value == "lora":
        draft.say(key, value, "mapped", "model.lora")
    elif value == "full":
        draft.say(key, value, "not needed", "all weights are trained where there is no model.lora")
    else:
        draft.say(key, value, "unsupported", "train an adapter (model.lora), or all weights")


def _adapts(rule: Rule) -> Rule:
    """A rule of an adapter's key; without `train_type` one is trained."""

    def chosen(draft: Draft, key: str, value: Any) -> None:
        name = next((one for one in ("tuner_type", "sft_type") if one in draft.given), "train_type")
        rule(draft, key, value) if name not in draft.given else lora_only(rule, name)(draft, key, value)

    return chosen


def _lowered(value: Any) -> Any:
    """`ALL`, as ms-swift 2 has it."""
    return "all" if str(value).upper() == "ALL" else value


def _scale(draft: Draft, key: str, value: Any) -> None:
    if value == "default" or draft.kind != "llm.sft":
        draft.say(key, value, "not needed", "as here")
    elif value == "last_round":
        draft.mapped(key, value, {"data.turns": "last"})
    elif value == "all":
        draft.mapped(key, value, {"data.roles": ["system", "user", "assistant", "tool"]})
    else:
        draft.say(key, value, "unsupported", "a row's `train` and data.roles say which messages carry loss")


def _cut(draft: Draft, key: str, value: Any) -> None:
    policies = {"delete": ("keep", "keep"), "left": ("left", "keep"), "right": ("left", "right")}
    if value not in policies or draft.kind != "llm.sft":
        draft.say(key, value, "not needed" if draft.kind == "llm.pretrain" else "unsupported", "see data.too_long")
        return
    prompt, answer = policies[value]
    fields = {"data.too_long.turns": "keep", "data.too_long.prompt": prompt, "data.too_long.answer": answer}
    draft.mapped(key, value, fields)


def _dtype(draft: Draft, key: str, value: Any) -> None:
    known = {"bfloat16": "bf16-mixed", "float16": "16-mixed", "float32": "32"}
    if value in known:
        draft.mapped(key, value, {"train.precision": known[value]})
    else:
        draft.say(key, value, "unsupported", f"choose train.precision: {', '.join(known.values())}")


def _loss(draft: Draft, key: str, value: Any) -> None:
    rules: dict[str, Rule] = {"llm.dpo": losses, "llm.grpo": online_loss, "llm.kto": to("task.loss")}
    rules.get(draft.kind, missing("a loss of one's own is a new kind: see CONTRIBUTING.md"))(draft, key, value)


def _kind_loss(draft: Draft, key: str, value: Any) -> None:
    own = {"task.loss": value} if value in ("orpo", "simpo", "cpo") else {}
    draft.mapped(key, value, {"task.kind": draft.kind, **own})


_LAYERS = missing("train an adapter (model.lora), or all weights")
_ENGINE = needless("completions are drawn in the trainer's own process")
_SWIFT = needless("a setting of ms-swift's own that changes no result")
_TEXTS = missing("texts only")

KEYS: dict[str, Rule] = {
    **TRAINER,
    **GRPO,
    **PPO,
    "local_rollout_forward_batch_size": _ENGINE,
    "num_sample_generations": needless("samples are kept at each evaluation"),
    "model": to("model.path"),
    "model_id_or_path": to("model.path"),  # this and the next ones are of ms-swift 2
    "sft_type": _tuning,
    "batch_size": to("data.batch.examples", whole),
    "lora_dropout_p": _adapts(LORA["dropout"]),
    "lora_target_modules": _adapts(to("model.lora.target_modules", lambda value: targets(_lowered(value)))),
    "use_ray": missing("several nodes: torchrun or SLURM"),
    "device_groups": missing("several nodes: torchrun or SLURM"),
    "model_type": needless("told by the model"),
    "task_type": needless("said by task.kind"),
    "model_revision": missing("fetch that revision, and give its folder as model.path"),
    "num_labels": needless("a reward is one number"),
    "problem_type": needless("task.loss"),
    "use_hf": needless("hub names are Hugging Face's; of ModelScope's, fetch the model and give its folder"),
    "hub_token": missing("never in a file: log in with `hf auth login`"),
    "torch_dtype": _dtype,
    "attn_impl": needless("chosen by the device"),
    "device_map": needless("train.strategy"),
    "max_memory": needless("train.strategy"),
    "rope_scaling": missing("set it in the model's config.json"),
    "max_model_len": needless("the model's own"),
    "model_kwargs": missing("set it in the model's config.json"),
    "new_special_tokens": unless_off(to("model.new_tokens", listed)),
    "tuner_backend": same("peft", "adapters are PEFT's; model.kernels: liger is faster on CUDA"),
    "train_type": _tuning,
    "tuner_type": _tuning,
    "adapters": unless_off(to("model.adapter", lambda value: listed(value)[0])),
    "external_plugins": missing("give your function: rewards: [{kind: function, function: file.py:name}]"),
    "custom_register_path": missing("data with known keys need no registering"),
    "dataset": _datasets("data.train"),
    "val_dataset": _datasets("data.validation"),
    "cached_dataset": missing("name the data themselves: data.train"),
    "split_dataset_ratio": missing("cut a validation file off, and name it: data.validation"),
    "dataset_num_proc": needless("read in threads"),
    "load_from_cache_file": needless("tokens are made anew at each start"),
    "dataset_shuffle": lambda draft, key, value: (
        draft.say(key, value, "not needed", "always shuffled")
        if value
        else draft.say(key, value, "unsupported", "examples are always shuffled by train.seed")
    ),
    "train_dataloader_shuffle": needless("always shuffled"),
    "val_dataset_shuffle": needless("order changes no metric"),
    "streaming": to("data.streaming", flag),
    "shuffle_buffer_size": to("data.buffer", whole),
    "interleave_prob": missing("give data sets weights: data.train: [{path, weight}]"),
    "columns": missing("rename the columns in the data"),
    "download_mode": _SWIFT,
    "stopping_strategy": _SWIFT,
    "strict": unless_off(to("data.on_bad", lambda value: "raise"), "bad rows are left out and counted"),
    "model_name": missing("only for the data set swift/self-cognition"),
    "model_author": missing("only for swift/self-cognition"),
    "custom_dataset_info": missing("name files: data.train"),
    "template": needless("the model's own template is used; `luthier inspect` shows it"),
    "system": missing("write it into the rows"),
    "agent_template": needless("the template writes tools"),
    "max_length": to("data.max_length", whole),
    "truncation_strategy": _cut,
    "loss_scale": _scale,
    "use_chat_template": lambda draft, key, value: (
        draft.say(key, value, "not needed", "as here")
        if value or draft.kind == "llm.pretrain"
        else draft.mapped(key, value, {"data.plain": True})
    ),
    "padding_free": needless("nothing is padded"),
    "padding_side": needless("nothing is padded"),
    "packing": unless_off(to("data.batch.packing", flag)),
    "packing_length": to("data.batch.tokens", whole),
    "packing_num_proc": _SWIFT,
    "lazy_tokenize": _SWIFT,
    "use_logits_to_keep": needless("only tokens with loss are projected"),
    "sequence_parallel_size": lambda draft, key, value: (
        draft.say(key, value, "not needed", "1 cuts nothing")
        if value == 1
        else draft.say(key, value, "unsupported", "train.strategy: fsdp2+tp cuts layers")
    ),
    "max_pixels": _TEXTS,
    "freeze_vit": _TEXTS,
    "freeze_aligner": _TEXTS,
    "freeze_llm": _TEXTS,
    "vit_lr": _TEXTS,
    "aligner_lr": _TEXTS,
    "vit_gradient_checkpointing": _TEXTS,
    "quant_method": same("bnb", "model.quantization: nf4, by bitsandbytes"),
    "quant_bits": unless_off(
        lambda draft, key, value: (four_bits if whole(value) == 4 else EIGHT_BITS)(draft, key, value)
    ),
    "bnb_4bit_compute_dtype": needless("by train.precision"),
    "bnb_4bit_use_double_quant": needless("always"),
    "bnb_4bit_quant_type": same("nf4", "4 bits are NormalFloat: nf4"),
    "lora_rank": _adapts(LORA["rank"]),
    "lora_alpha": _adapts(LORA["alpha"]),
    "lora_dropout": _adapts(LORA["dropout"]),
    "target_modules": _adapts(LORA["target"]),
    "target_regex": _adapts(to("model.lora.target_modules", str)),
    "modules_to_save": _adapts(LORA["save"]),
    "use_dora": _adapts(LORA["dora"]),
    "use_rslora": _adapts(LORA["rslora"]),
    "lora_bias": missing("biases stay as they are"),
    "lora_dtype": needless("adapters are trained in 32 bits"),
    "init_weights": lambda draft, key, value: (
        draft.say(key, value, "not needed", "as here")
        if str(value).lower() == "true"
        else draft.mapped(key, value, {"model.lora.init": str(value).split("_niter")[0]})
    ),
    "lorap_lr_ratio": missing("optim.groups gives parameters a rate of their own"),
    "freeze_parameters": _LAYERS,
    "freeze_parameters_ratio": _LAYERS,
    "trainable_parameters": _LAYERS,
    "use_galore": missing("optim.name: adamw_8bit needs less memory too"),
    "lisa_activated_layers": _LAYERS,
    "enable_dft_loss": unless_off(to("task.loss.dynamic", flag)),
    "enable_channel_loss": missing("evaluate.slices: [channel] gives the loss by a field of the rows"),
    "router_aux_loss_coef": missing("router_aux_loss_coef in the model's config.json"),
    "optimizer": missing("optim.name"),
    "metric": missing("evaluate.generate.scores"),
    "predict_with_generate": missing("evaluate.generate lets the model answer"),
    "acc_strategy": needless("accuracy of tokens"),
    "max_epochs": missing("train.epochs or train.steps"),
    "add_version": needless("a run in the same folder goes on; train.fresh makes a new one"),
    "check_model": _SWIFT,
    "create_checkpoint_symlink": needless("checkpoints/best and checkpoints/last"),
    "resume_only_model": missing("give the checkpoint's model as model.path"),
    "use_flash_ckpt": missing("checkpoint.asynchronous"),
    "early_stop_interval": unless_off(to("evaluate.patience", whole)),
    "merge_lora": missing("luthier export --to merged"),
    "eval_use_evalscope": missing("evaluate.harness"),
    "eval_limit": unless_off(to("evaluate.limit", whole)),
    "rlhf_type": _kind_loss,
    "beta": BETA,
    "loss_type": _loss,
    "loss_weights": lambda draft, key, value: draft.say(key, value, "mapped", "task.loss[].weight"),
    "ref_model": by_kind({one: unless_off(to("model.reference")) for one in ("llm.dpo", "llm.kto", "llm.grpo")}),
    "ref_adapters": needless("with model.adapter the reference is that adapter as it was"),
    "label_smoothing": by_kind({"llm.dpo": unless_off(to("task.label_smoothing", number))}),
    "rpo_alpha": by_kind({"llm.dpo": unless_off(to("task.sft_weight", number))}),
    "cpo_alpha": by_kind({"llm.dpo": to("task.sft_weight", number)}),
    "simpo_gamma": by_kind({"llm.dpo": to("task.simpo_gamma", number)}),
    "discopop_tau": by_kind({"llm.dpo": unless_off(to("task.discopop_tau", number))}),
    "ld_alpha": missing("task.loss has no such weight"),
    "desirable_weight": by_kind({"llm.kto": to("task.desirable_weight", number)}),
    "undesirable_weight": by_kind({"llm.kto": to("task.undesirable_weight", number)}),
    "center_rewards_coefficient": by_kind({"llm.reward": unless_off(to("task.centering", number))}),
    "teacher_model": by_kind({"llm.distill": to("model.teacher")}),
    "lmbda": by_kind({"llm.distill": to("task.on_policy", number)}),
    "sft_alpha": by_kind({"llm.distill": to("task.sft_weight", number)}),
    "seq_kd": missing("train on its texts: llm.sft"),
    "offload_teacher_model": missing("task.top_k asks the teacher once, before the training"),
    "max_completion_length": by_kind(
        {
            **dict.fromkeys(("llm.grpo", "llm.ppo"), to("rollout.max_new_tokens", whole)),
            "llm.distill": to("task.max_new_tokens", whole),
        }
    ),
    "temperature": by_kind(
        {
            **dict.fromkeys(("llm.grpo", "llm.ppo"), to("rollout.temperature", number)),
            "llm.distill": to("task.sampling_temperature", number),
        }
    ),
    "reward_funcs": rewards,
    "reward_model": rewarded,
    "overlong_filter": to("task.mask_truncated", flag),
    "max_resample_times": to("task.resample", whole),
    **dict.fromkeys(
        (
            "vllm_mode",
            "vllm_gpu_memory_utilization",
            "vllm_tensor_parallel_size",
            "vllm_max_model_len",
            "vllm_server_host",
            "vllm_server_port",
            "vllm_server_timeout",
            "vllm_enable_prefix_caching",
            "vllm_max_num_seqs",
            "sleep_level",
            "offload_model",
            "offload_optimizer",
            "move_model_batches",
            "num_infer_workers",
            "async_generate",
        ),
        _ENGINE,
    ),
    **dict.fromkeys(
        (
            "swanlab_project",  # only with report_to: swanlab
            "swanlab_workspace",
            "swanlab_exp_name",
            "swanlab_mode",
            "swanlab_token",
        ),
        needless("a setting of a tracker"),
    ),
}
"""What becomes of each key."""


def settle(draft: Draft) -> None:
    given = (draft.given.get(name) for name in ("tuner_type", "train_type", "sft_type"))
    tuning = next((one for one in given if one), "lora")
    if "rlhf_type" not in draft.given and draft.kind == "llm.sft":
        draft.say(
            "(command)", None, "default", "task.kind: llm.sft, as of `swift sft`; for `swift pt`, --kind llm.pretrain"
        )
    draft.default("optim.learning_rate", 1e-5 if tuning == "full" else 1e-4)
    draft.default("optim.weight_decay", 0.1)
    draft.default("optim.betas", [0.9, 0.95])
    draft.default("optim.schedule", "cosine")
    draft.default("optim.warmup", 0)
    if "gradient_checkpointing" not in draft.given:
        draft.default("train.gradient_checkpointing", True)
    if draft.get("train.steps") is None:
        draft.default("train.epochs", 3.0)
    draft.default("data.batch.examples", 1)
    if "gradient_accumulation_steps" not in draft.given and draft.kind != "llm.grpo":
        draft.default("train.accumulate", -(-16 // int(draft.get("data.batch.examples", 1))))
    _settle_kind(draft)
    adapts = tuning == "lora" and is_off(draft.given.get("adapters"))
    with_lora(draft, adapts, {"rank": 8, "alpha": 32, "dropout": 0.05, "target_modules": "all-linear"})
    if draft.kind == "llm.pretrain":
        draft.drop("data.batch.packing")  # its blocks are always full
    packed(draft)
    rollouts(draft)
    need(draft, "data.train", "no data set is named")


def _settle_kind(draft: Draft) -> None:
    """The tool's defaults of each training."""
    if draft.given.get("rlhf_type") == "simpo":
        draft.default("task.beta", 2.0)
        draft.default("task.simpo_gamma", 1.0)
    if draft.kind == "llm.grpo":
        draft.default("task.kl.weight", 0.04)
    if draft.kind == "llm.ppo":
        draft.default("rollout.num_generations", 1)
        draft.default("rollout.iterations", 4)
    if draft.kind in ("llm.grpo", "llm.ppo"):
        draft.default("rollout.temperature", 0.9)
        draft.default("rollout.max_new_tokens", 512)
    if draft.kind == "llm.distill":
        draft.put("task.divergence", "generalised")
        draft.default("task.mixture", 0.5)
        draft.default("task.on_policy", 0.5)
        draft.default("task.sampling_temperature", 0.9)
        draft.default("task.max_new_tokens", 512)
