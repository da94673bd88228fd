"""TRL's keys (trl sft --config FILE, trl dpo, kto, reward, grpo, rloo)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..common.errors import RecipeError
from .draft import Draft, Rule, is_off
from .language import (
    BETA,
    EIGHT_BITS,
    GRPO,
    HEARD,
    LORA,
    four_bits,
    jinja,
    losses,
    need,
    online_loss,
    packed,
    rewards,
    rollouts,
    sources,
    with_lora,
)
from .rules import by_kind, choice, flag, listed, missing, needless, number, only_with, same, to, unless_off, whole
from .trainer import TRAINER

TELLING = frozenset(
    {
        "dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "use_peft",
        "assistant_only_loss",
        "completion_only_loss", "dataset_text_field", "dtype", "packing_strategy",
        "reward_model_name_or_path", "dataset_streaming", "lora_task_type",
        "test_split_size", "pad_to_multiple_of", "dataset_mixture", "dataset_mixer", "dataset_splits",
    }
)  # fmt: skip

_ONLY: dict[str, frozenset[str]] = {
    "llm.sft": frozenset(
        {"packing", "packing_strategy", "assistant_only_loss", "completion_only_loss", "dataset_text_field",
         "eos_token", "eval_packing", "chat_template_path", "dataset_kwargs"}
    ),
    "llm.dpo": frozenset(
        {"loss_weights", "f_divergence_type", "f_alpha_divergence_coef", "use_weighting", "discopop_tau", "ld_alpha",
         "label_smoothing", "rpo_alpha"}
    ),
    "llm.kto": frozenset({"desirable_weight", "undesirable_weight"}),
    "llm.reward": frozenset({"center_rewards_coefficient"}),
    "llm.grpo": frozenset(
        {"num_generations", "max_completion_length", "reward_funcs", "reward_model_name_or_path", "epsilon",
         "epsilon_high", "num_iterations", "use_vllm", "scale_rewards", "reward_weights", "mask_truncated_completions"}
    ),
}  # fmt: skip
"""Keys that only one of the commands takes."""


def kind(given: Mapping[str, Any], where: str) -> str:
    """The command is not in the file: it is told by the keys that only one of them takes."""
    found = [name for name, keys in _ONLY.items() if keys & given.keys()]
    heard = given.get("loss_type")
    by_loss = {"kto": "llm.kto", "apo_zero_unpaired": "llm.kto", "nll": "llm.sft", "dft": "llm.sft"}
    if not found and isinstance(heard, str):
        found = [by_loss.get(heard, "llm.dpo")]
    elif not found and isinstance(heard, list):
        found = ["llm.dpo"]
    if len(found) == 1:
        return found[0]
    raise RecipeError(
        "can't tell which command this is for" if not found else "has keys of several commands",
        where=where,
        given=", ".join(found) or None,
        do="say what is trained: --kind llm.sft, llm.dpo, llm.kto, llm.reward or llm.grpo",
    )


def _data(draft: Draft, key: str, value: Any) -> None:
    split, test = (str(draft.given.get(f"dataset_{one}_split", one)) for one in ("train", "test"))
    place = str(value)
    if place.endswith((".jsonl", ".json", ".csv", ".parquet")):
        draft.mapped(key, value, {"data.train": place})
        return
    fields: dict[str, Any] = {"data.train": {"path": place, "split": split}}
    wanted = draft.given.get("eval_strategy", draft.given.get("evaluation_strategy"))
    if not is_off(wanted) and not draft.has("test_split_size"):
        fields["data.validation"] = {"path": place, "split": test}
    draft.mapped(key, value, fields)


def _mixture(draft: Draft, key: str, value: Any) -> None:
    """`datasets`, data sets with splits and fractions, which open-r1 and the alignment handbook call weights."""
    found: list[Any] = []
    for at, one in enumerate(value):
        files = one.get("data_files")
        path = files if isinstance(files, str) else one.get("path", one.get("id"))
        part = one.get("fraction", one.get("weight"))
        share = {"weight": number(part)} if part is not None and number(part) != 1 else {}
        split = {"split": one["split"]} if one.get("split") and not isinstance(files, str) else {}
        found.append({"path": path, **split, **share} if share or split else path)
        draft.say(f"{key}[{at}]", path, "mapped", f"data.train: {found[-1]}")
        known = {"path", "id", "split", "fraction", "weight"} | ({"data_files"} if isinstance(files, str) else set())
        for name in [name for name in one if name not in known]:
            if name == "columns":
                draft.say(f"{key}[{at}].{name}", one[name], "not needed", "rows are told apart by their keys")
            else:
                draft.say(f"{key}[{at}].{name}", one[name], "unsupported", "save that part as a file, and name it")
    sources(draft, "data.train", found)


def _mixer(draft: Draft, key: str, value: Any) -> None:
    """The alignment handbook's older form: names with shares, and the splits that there are of each."""
    splits = listed(draft.given.get("dataset_splits") or ["train", "test"])
    evaluated = not is_off(draft.given.get("do_eval"))
    for place, part in (("data.train", "train"), ("data.validation", "test")):
        found = [{"path": name, "split": split} for name in value for split in splits if part in split]
        if part == "train":
            found = [{**one, **({"weight": value[one["path"]]} if value[one["path"]] != 1 else {})} for one in found]
        if part == "train" or evaluated:
            sources(draft, place, found)
            draft.say(key, value, "mapped", f"{place}: {found}")


def _completion_only(draft: Draft, key: str, value: Any) -> None:
    if value is False:
        roles = ["system", "user", "assistant", "tool"]
        draft.mapped(key, value, {"data.roles": roles}, "prompts of plain texts never carry loss")
    else:
        draft.say(key, value, "not needed", "prompts carry no loss")


def _assistant_only(draft: Draft, key: str, value: Any) -> None:
    if value:
        draft.say(key, value, "not needed", "what assistants say carries loss")
    else:
        draft.mapped(key, value, {"data.roles": ["system", "user", "assistant", "tool"]})


def _loss(draft: Draft, key: str, value: Any) -> None:
    rules: dict[str, Rule] = {
        "llm.sft": choice("task.loss.dynamic", HEARD),
        "llm.dpo": losses,
        "llm.kto": choice("task.loss", {"kto": "kto", "apo_zero_unpaired": "apo_zero_unpaired"}),
        "llm.grpo": online_loss,
    }
    rules.get(draft.kind, missing("task.loss"))(draft, key, value)


def _dtype(draft: Draft, key: str, value: Any) -> None:
    if value == "float16":
        draft.say(key, value, "unsupported", "train.precision: 16-mixed, with weights in 32 bits")
    elif value == "bfloat16" and not draft.has("use_peft") and draft.given.get("bf16") is False:
        draft.mapped(key, value, {"train.precision": "bf16-true"})
    else:
        draft.say(key, value, "not needed", "weights that are trained are kept in 32 bits; see train.precision")


_ENGINE = needless("completions are drawn in the trainer's own process")
_LORA_ON = "use_peft"

KEYS: dict[str, Rule] = {
    **TRAINER,
    **GRPO,
    "model_name_or_path": to("model.path"),
    "trust_remote_code": to("model.trust_remote_code", flag),
    "model_revision": same("main", "fetch that revision, and give its folder as model.path"),
    "dtype": _dtype,
    "torch_dtype": _dtype,
    "attn_implementation": needless("chosen by the device"),
    "model_init_kwargs": missing("set it in the model's config.json"),
    "use_peft": lambda draft, key, value: draft.say(
        key, value, "mapped" if value else "not needed", "model.lora" if value else "all weights are trained"
    ),
    "lora_r": only_with(_LORA_ON, LORA["rank"]),
    "lora_alpha": only_with(_LORA_ON, LORA["alpha"]),
    "lora_dropout": only_with(_LORA_ON, LORA["dropout"]),
    "lora_target_modules": only_with(_LORA_ON, unless_off(LORA["target"])),
    "lora_target_parameters": missing("layers get adapters, by name: model.lora.target_modules"),
    "lora_modules_to_save": only_with(_LORA_ON, LORA["save"]),
    "lora_task_type": needless("said by task.kind"),
    "use_rslora": only_with(_LORA_ON, LORA["rslora"]),
    "use_dora": only_with(_LORA_ON, LORA["dora"]),
    "load_in_4bit": unless_off(four_bits),
    "load_in_8bit": EIGHT_BITS,
    "bnb_4bit_quant_type": same("nf4", "4 bits are NormalFloat: nf4"),
    "use_bnb_nested_quant": needless("always"),
    "bnb_4bit_quant_storage": needless("by the layer"),
    "dataset_name": _data,
    "datasets": _mixture,
    "dataset_mixture.datasets": _mixture,
    "dataset_mixture.seed": needless("one seed: train.seed"),
    "dataset_mixture.test_split_size": missing("cut a validation file off, and name it: data.validation"),
    "dataset_mixer": _mixer,
    "dataset_splits": needless("said by data.train"),
    "dataset_configs": missing("save that configuration as a file, and name it"),
    "dataset_config": missing("save that configuration as a file, and name it"),
    "dataset_train_split": needless("said by data.train"),
    "dataset_test_split": needless("said by data.validation"),
    "dataset_streaming": to("data.streaming", flag),
    "streaming": to("data.streaming", flag),
    "test_split_size": missing("cut a validation file off, and name it: data.validation"),
    "dataset_text_field": lambda draft, key, value: (
        draft.say(key, value, "not needed", "the name that is looked for")
        if value == "text"
        else draft.say(key, value, "unsupported", "rename the column to text")
    ),
    "dataset_kwargs": missing("rows are made examples by their keys"),
    "dataset_num_proc": needless("read in threads"),
    "preprocessing_num_workers": needless("read in threads"),
    "shuffle_dataset": needless("always shuffled"),
    "train_sampling_strategy": needless("always shuffled"),
    "ignore_bias_buffers": needless("found out"),
    "env": missing("set variables before the command"),
    "max_length": to("data.max_length", whole),
    "max_seq_length": to("data.max_length", whole),
    "use_liger": unless_off(to("model.kernels", lambda value: "liger")),
    "chat_template": unless_off(jinja),
    "system_prompt": missing("write it into the rows"),
    "benchmarks": missing("evaluate.harness"),
    "callbacks": missing("what they do is no part of a recipe"),
    "hub_model_revision": needless("`luthier export ... --push REPO`"),
    "num_processes": needless("as many as torchrun or SLURM have started"),
    "wandb_project": needless("a setting of a tracker"),
    "wandb_entity": needless("a setting of a tracker"),
    "truncation_mode": lambda draft, key, value: draft.say(
        key, value, "unsupported", "data.too_long: examples lose their oldest exchanges, then the begin of the prompt"
    ),
    "packing": unless_off(to("data.batch.packing", flag)),
    "packing_strategy": lambda draft, key, value: (
        draft.say(key, value, "unsupported", "documents are packed whole: the best fit")
        if value == "wrapped"
        else draft.say(key, value, "not needed", "as here")
    ),
    "eval_packing": needless("evaluation never pads"),
    "padding_free": needless("nothing is padded"),
    "pad_to_multiple_of": needless("nothing is padded"),
    "pad_token": needless("nothing is padded"),
    "eos_token": missing("ends of turns are found in the template; set it in the tokenizer"),
    "chat_template_path": unless_off(to("data.chat_template")),
    "chat_template_kwargs": missing("a field of the rows"),
    "completion_only_loss": _completion_only,
    "assistant_only_loss": _assistant_only,
    "loss_type": _loss,
    "activation_offloading": missing("train.gradient_checkpointing"),
    "disable_dropout": lambda draft, key, value: (
        draft.say(key, value, "unsupported", "dropout is the model's; set it to 0 in its config.json")
        if value
        else draft.say(key, value, "not needed", "as here")
    ),
    "router_aux_loss_coef": missing("router_aux_loss_coef in the model's config.json"),
    "cast_lm_head_to_fp32": needless("the loss is computed in 32 bits"),
    "beta": BETA,
    "label_smoothing": by_kind({"llm.dpo": unless_off(to("task.label_smoothing", number))}),
    "loss_weights": lambda draft, key, value: draft.say(key, value, "mapped", "task.loss[].weight"),
    "f_divergence_type": by_kind({"llm.dpo": to("task.f_divergence", str)}),
    "f_alpha_divergence_coef": by_kind({"llm.dpo": to("task.f_alpha", number)}),
    "discopop_tau": by_kind({"llm.dpo": to("task.discopop_tau", number)}),
    "rpo_alpha": by_kind({"llm.dpo": unless_off(to("task.sft_weight", number))}),
    "use_weighting": missing("pairs all weigh the same"),
    "ld_alpha": missing("task.loss has no such weight"),
    "precompute_ref_log_probs": by_kind(
        {"llm.dpo": to("task.precompute_reference", flag), "llm.kto": to("task.precompute_reference", flag)}
    ),
    "precompute_ref_batch_size": needless("evaluate.batch"),
    "desirable_weight": by_kind({"llm.kto": to("task.desirable_weight", number)}),
    "undesirable_weight": by_kind({"llm.kto": to("task.undesirable_weight", number)}),
    "center_rewards_coefficient": by_kind({"llm.reward": unless_off(to("task.centering", number))}),
    "reward_funcs": rewards,
    "reward_model_name_or_path": lambda draft, key, value: draft.mapped(
        key, value, {"rewards": [*draft.get("rewards", []), {"kind": "model", "path": value}]}
    ),
    "sapo_temperature_pos": by_kind({"llm.grpo": to("task.sapo_temperature_positive", number)}),
    "sapo_temperature_neg": by_kind({"llm.grpo": to("task.sapo_temperature_negative", number)}),
    "max_prompt_length": by_kind(
        {"llm.grpo": to("data.max_length", whole)}, "data.max_length bounds a prompt with its answer"
    ),
    "num_generations_eval": by_kind({"llm.grpo": to("evaluate.answers", whole)}),
    "top_entropy_quantile": lambda draft, key, value: (
        draft.say(key, value, "not needed", "1 is all tokens, as here")
        if value == 1
        else draft.say(key, value, "unsupported", "all tokens are trained")
    ),
    **dict.fromkeys(
        (
            "vllm_mode",
            "vllm_device",
            "vllm_dtype",
            "vllm_max_model_len",
            "vllm_server_host",
            "vllm_server_port",
            "vllm_server_base_url",
            "vllm_server_timeout",
            "vllm_gpu_memory_utilization",
            "vllm_tensor_parallel_size",
            "vllm_max_model_length",
            "vllm_model_impl",
            "vllm_enable_sleep_mode",
            "ds3_gather_for_generation",
            "vllm_importance_sampling_correction",
            "cache_implementation",
        ),
        _ENGINE,
    ),
    "num_completions_to_print": needless("all are in OUTPUT/rollouts"),
    "log_unique_prompts": needless("all are in OUTPUT/rollouts"),
}
"""What becomes of each key."""

_RATES = {"llm.sft": 2e-5, "llm.reward": 1e-4}


def settle(draft: Draft) -> None:
    draft.default("optim.learning_rate", _RATES.get(draft.kind, 1e-6))
    draft.default("optim.weight_decay", 0.0)
    draft.default("optim.warmup", 0)
    draft.default("train.precision", "bf16-mixed")
    if "gradient_checkpointing" not in draft.given:
        draft.default("train.gradient_checkpointing", True)
    if draft.get("train.steps") is None:
        draft.default("train.epochs", 3.0)
    if draft.kind != "llm.grpo":
        draft.default("data.max_length", 1024)
    else:
        draft.default("task.loss", "dapo")
        draft.default("task.clip_high", draft.get("task.clip_low", 0.2))
        draft.default("rollout.max_new_tokens", 512)
        if "rewards" not in draft.tree:
            need(draft, "rewards", "reward_funcs names none; see `luthier recipes show llm/grpo`")
    with_lora(draft, draft.has("use_peft"), {"rank": 16, "alpha": 32, "dropout": 0.05, "target_modules": "all-linear"})
    packed(draft)
    rollouts(draft)
    need(draft, "data.train", "no data set is named")
