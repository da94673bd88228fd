"""The keys of transformers' TrainingArguments, which every one of the tools has."""

from __future__ import annotations

import re
from typing import Any, get_args

from ..common.recipe import TrackSection
from .draft import Draft, Rule, is_off
from .rules import choice, flag, listed, missing, needless, number, only_with, to, unless_off, whole

OPTIMIZERS = {
    "adamw": "adamw",
    "adamw_hf": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_apex_fused": "adamw",
    "paged_adamw": "adamw",  # its moments are not paged here, which changes no result
    "paged_adamw_32bit": "adamw",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "sgd": "sgd",
    "adafactor": "adafactor",
}

SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse_sqrt",
    "warmup_stable_decay": "wsd",
}

_QUIET = "how it is shown; curves and samples are always written"
_ITS_OWN = "done without being asked"


def strategy(draft: Draft, key: str, value: Any) -> None:
    """A DeepSpeed configuration, by the stage in its name or its content."""
    stage = re.search(r"zero[_-]?([0-3])|z([0-3])|stage[_-]?([0-3])", str(value).lower())
    inside = value.get("zero_optimization", {}).get("stage") if isinstance(value, dict) else None
    number = int(inside) if inside is not None else int(next(one for one in stage.groups() if one)) if stage else None
    if number is None:
        draft.say(
            key, value, "unsupported", "set train.strategy: deepspeed_zero1, _zero2 or _zero3, each also _offload"
        )
    elif number == 0:
        draft.mapped(key, value, {"train.strategy": "ddp"}, "stage 0 cuts nothing")
    else:
        end = "_offload" if "offload" in str(value).lower() else ""
        draft.mapped(key, value, {"train.strategy": f"deepspeed_zero{number}{end}"}, "further settings are ours")


def tracker(name: str) -> Rule:
    """A key that switches a tracker on."""
    return lambda draft, key, value: _track(draft, key, value, [name])


def _track(draft: Draft, key: str, value: Any, names: list[str]) -> None:
    wanted = [*draft.get("track.loggers", ["csv"]), *names]
    draft.mapped(key, value, {"track.loggers": list(dict.fromkeys(wanted))})


def loggers(draft: Draft, key: str, value: Any) -> None:
    """Trackers: those that we know by name."""
    known = _texts(TrackSection.model_fields["loggers"].annotation)
    wanted = listed(value) if not is_off(value) else []
    if wanted == ["all"]:
        draft.say(key, value, "unsupported", f"name them: track.loggers of {', '.join(sorted(known))}")
        return
    unknown = [one for one in wanted if one not in known and one != "none"]
    found = [one for one in wanted if one in known]
    if found:
        _track(draft, key, value, found)
    if unknown:
        draft.say(key, value, "unsupported", f"no logger {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    if not wanted or wanted == ["none"]:
        draft.say(key, value, "not needed", "curves.csv is always written")


def _texts(annotation: Any) -> set[str]:
    """The strings of a type, wherever they stand in it."""
    return {annotation} if isinstance(annotation, str) else {
        text for part in get_args(annotation) for text in _texts(part)
    }  # fmt: skip


def evaluated(draft: Draft, key: str, value: Any) -> None:
    """`eval_strategy`; its steps have a key of their own."""
    if is_off(value):
        draft.mapped(key, value, {"evaluate.every": "never"})
    elif value == "epoch":
        draft.mapped(key, value, {"evaluate.every": "epoch"})
    else:
        draft.say(key, value, "not needed", "said by evaluate.every")
        if not draft.has("eval_steps"):
            draft.default(
                "evaluate.every", whole(draft.given.get("save_steps") or draft.given.get("logging_steps") or 500)
            )


def saved(draft: Draft, key: str, value: Any) -> None:
    """`save_strategy`; a checkpoint is written after each evaluation and at the end in any case."""
    if value == "steps":
        draft.say(key, value, "not needed", "said by checkpoint.every")
    else:
        draft.mapped(key, value, {"checkpoint.every": None}, "saved after each evaluation and at the end")


def steps(place: str, *strategies: str) -> Rule:
    """An interval in optimizer steps, which counts unless one of these keys asks for another; one as a share of the run
    has no counterpart."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        other = [name for name in strategies if draft.given.get(name) not in (None, "steps")]
        if other:
            draft.say(key, value, "not needed", f"counts only with {other[0]}: steps")
        elif is_off(value) or (isinstance(value, float) and value < 1):
            draft.say(key, value, "unsupported", f"a share of the run; set {place} to a number of steps")
        else:
            draft.mapped(key, value, {place: max(1, whole(value))})

    return rule


def limit(draft: Draft, key: str, value: Any) -> None:
    """`max_steps` comes before epochs; -1 is none."""
    if is_off(value) or number(value) < 0:
        draft.say(key, value, "not needed", "no bound; epochs count")
    else:
        draft.mapped(key, value, {"train.steps": whole(value)})


def epochs(draft: Draft, key: str, value: Any) -> None:
    bound = draft.given.get("max_steps")
    if not is_off(bound) and number(bound) > 0:
        draft.say(key, value, "not needed", "max_steps comes before it")
    else:
        draft.mapped(key, value, {"train.epochs": number(value)})


def lowest(draft: Draft, key: str, value: Any) -> None:
    """`lr_scheduler_kwargs`: the lowest rate of a cosine."""
    peak = draft.given.get("learning_rate")
    if isinstance(value, dict) and set(value) == {"min_lr_rate"}:
        draft.mapped(key, value, {"optim.final": number(value["min_lr_rate"])})
    elif isinstance(value, dict) and set(value) == {"min_lr"} and peak is not None:
        draft.mapped(key, value, {"optim.final": round(number(value["min_lr"]) / number(peak), 6)})
    else:
        draft.say(key, value, "unsupported", "of these, only a lowest rate is known: optim.final")


TRAINER: dict[str, Rule] = {
    "output_dir": to("output", str),
    "overwrite_output_dir": needless("nothing is overwritten; a run in the same folder goes on"),
    "do_train": needless(_ITS_OWN),
    "do_eval": needless("evaluated if data.validation is given"),
    "do_predict": missing("use `luthier evaluate CHECKPOINT test`"),
    "run_name": needless(_QUIET),
    "learning_rate": to("optim.learning_rate", number),
    "weight_decay": to("optim.weight_decay", number),
    "adam_beta1": lambda draft, key, value: draft.mapped(
        key, value, {"optim.betas": [number(value), draft.get("optim.betas", [0.9, 0.999])[1]]}
    ),
    "adam_beta2": lambda draft, key, value: draft.mapped(
        key, value, {"optim.betas": [draft.get("optim.betas", [0.9, 0.999])[0], number(value)]}
    ),
    "adam_epsilon": to("optim.eps", number),
    "max_grad_norm": lambda draft, key, value: draft.mapped(
        key, value, {"optim.clip_norm": number(value) if not is_off(value) else None}
    ),
    "optim": choice("optim.name", OPTIMIZERS),
    "optim_args": missing("optimizers have no further settings than those of `optim`"),
    "lr_scheduler_type": choice("optim.schedule", SCHEDULES),
    "lr_scheduler_kwargs": unless_off(lowest),
    "warmup_steps": to("optim.warmup", number),
    "warmup_ratio": unless_off(to("optim.warmup", number), "no warm-up by share"),
    "num_train_epochs": epochs,
    "max_steps": limit,
    "per_device_train_batch_size": to("data.batch.examples", whole),
    "per_device_eval_batch_size": to("evaluate.batch", whole),
    "gradient_accumulation_steps": to("train.accumulate", whole),
    "eval_accumulation_steps": needless("predictions don't pile up on the device"),
    "auto_find_batch_size": missing("`luthier check` runs the largest batch; set data.batch yourself"),
    "gradient_checkpointing": to("train.gradient_checkpointing", flag),
    "gradient_checkpointing_kwargs": needless("always non-reentrant"),
    "bf16": unless_off(lambda draft, key, value: draft.mapped(key, value, {"train.precision": "bf16-mixed"})),
    "fp16": unless_off(lambda draft, key, value: draft.mapped(key, value, {"train.precision": "16-mixed"})),
    "tf32": needless("a setting of the device"),
    "seed": to("train.seed", whole),
    "data_seed": needless("one seed: train.seed"),
    "full_determinism": needless("resumed on CPU a run is exact to the bit; on CUDA set torch's own switches"),
    "logging_steps": steps("train.log_every"),
    "logging_first_step": needless(_QUIET),
    "logging_strategy": needless(_QUIET),
    "logging_dir": needless(_QUIET),
    "log_level": needless(_QUIET),
    "disable_tqdm": needless(_QUIET),
    "include_tokens_per_second": needless("speed is always logged"),
    "include_num_input_tokens_seen": needless("speed is always logged"),
    "report_to": loggers,
    "eval_strategy": evaluated,
    "evaluation_strategy": evaluated,
    "eval_steps": unless_off(steps("evaluate.every", "eval_strategy", "evaluation_strategy")),
    "eval_on_start": to("evaluate.at_start", flag),
    "save_strategy": saved,
    "save_steps": steps("checkpoint.every", "save_strategy"),
    "save_total_limit": unless_off(to("checkpoint.keep_last", whole), "no bound given; the default holds"),
    "save_only_model": missing("a checkpoint always holds what resuming needs"),
    "save_safetensors": needless("always safetensors"),
    "save_on_each_node": missing("one process writes, for all nodes"),
    "load_best_model_at_end": needless("the best checkpoint is kept: checkpoints/best"),
    "metric_for_best_model": lambda draft, key, value: draft.mapped(
        key,
        value,
        {"checkpoint.best": str(value).removeprefix("eval_")},
        "`luthier check` says if there is such a metric",
    ),
    "greater_is_better": needless("a metric knows which way is better"),
    "resume_from_checkpoint": needless("the same command goes on where the run stopped"),
    "ignore_data_skip": needless("where a run stands in its data is known at once"),
    "dataloader_num_workers": to("data.workers", whole),
    "dataloader_pin_memory": needless("a setting of the loader that changes no result"),
    "dataloader_persistent_workers": needless("a setting of the loader that changes no result"),
    "dataloader_prefetch_factor": needless("a setting of the loader that changes no result"),
    "dataloader_drop_last": needless("batches are planned; none is dropped"),
    "remove_unused_columns": needless("fields that are not used stay as slices"),
    "group_by_length": needless("batches hold similar lengths: data.batch.bucket_batches"),
    "torch_compile": to("train.compile", flag),
    "torch_compile_backend": needless("torch's default"),
    "torch_compile_mode": needless("torch's default"),
    "deepspeed": unless_off(strategy),
    "fsdp": unless_off(to("train.strategy", lambda value: "fsdp2")),
    "fsdp_config": only_with("fsdp", needless("fully_shard, layer by layer, with our settings")),
    "ddp_timeout": needless("train.timeout is about a run that makes no progress"),
    "ddp_find_unused_parameters": needless("found out"),
    "ddp_backend": needless("by device"),
    "neftune_noise_alpha": unless_off(to("task.neftune_alpha", number)),
    "label_smoothing_factor": unless_off(to("task.loss.label_smoothing", number)),
    "use_liger_kernel": unless_off(to("model.kernels", lambda value: "liger")),
    "push_to_hub": missing("after the run: `luthier export ... --push REPO`"),
    "hub_model_id": needless("`luthier export ... --push REPO` names it"),
    "hub_strategy": needless("`luthier export ... --push REPO`, once"),
    "hub_private_repo": needless("`luthier export ... --push REPO` is private"),
    "hub_token": missing("never in a file: log in with `hf auth login`"),
    "average_tokens_across_devices": needless("the loss is divided by the tokens of all devices"),
    "use_cpu": unless_off(to("train.accelerator", lambda value: "cpu")),
}
"""Keys of transformers' TrainingArguments, and what becomes of them."""
