"""What trainings of language models have in common in all of the tools."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..common.errors import RecipeError
from .draft import Draft, Rule, is_off
from .rules import by_kind, choice, flag, listed, missing, number, to, unless_off, whole

PAIRS = ("sigmoid", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
         "apo_zero", "apo_down", "discopop", "sigmoid_norm", "orpo", "simpo", "cpo")  # fmt: skip
"""Losses of pairs; the tools have them under TRL's names, as we do."""

ONLINE = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "gspo", "rloo")

HEARD = {"dft": True, "nll": False}
"""TRL's losses of SFT, and whether they are dynamic."""


def unknown(what: object, where: str, expected: str, do: str | None = None) -> RecipeError:
    """The error for a training that there is no kind for."""
    return RecipeError("a training that is not known here", where=where, given=what, expected=expected, do=do)


LORA: dict[str, Rule] = {
    "rank": to("model.lora.rank", whole),
    "alpha": to("model.lora.alpha", number),
    "dropout": to("model.lora.dropout", number),
    "target": lambda draft, key, value: draft.mapped(key, value, {"model.lora.target_modules": targets(value)}),
    "save": unless_off(to("model.lora.modules_to_save", listed)),
    "dora": to("model.lora.dora", flag),
    "rslora": to("model.lora.rslora", flag),
}
"""The fields of LoRA, which every tool names in its own way."""


def jinja(draft: Draft, key: str, value: Any) -> None:
    """A chat template: a file, or the template itself."""
    if "{" in str(value):
        draft.say(key, value, "unsupported", "write it into a file: data.chat_template: FILE")
    else:
        draft.mapped(key, value, {"data.chat_template": value})


def targets(value: Any) -> str | list[str]:
    """Names of modules; the tools say `all` and `all-linear` for every linear layer."""
    names = listed(value)
    return "all-linear" if names in (["all"], ["all-linear"], ["all_linear"]) else names


def with_lora(draft: Draft, wanted: bool, defaults: Mapping[str, Any]) -> None:
    """Leave `model.lora` out of a full training, or complete it with the tool's defaults."""
    if not wanted:
        draft.drop("model.lora")
        return
    for name, value in defaults.items():
        draft.default(f"model.lora.{name}", value)
    if draft.get("model.lora.init") == "pissa" and draft.get("model.quantization", "none") != "none":
        draft.drop("model.lora.init")  # PEFT refuses it
        draft.say("(adapter)", "pissa", "unsupported", "it takes the base's weights apart, which 4 bits don't allow")


def lora_only(rule: Rule, wanted: str) -> Rule:
    """A rule of an adapter's key, which needs no place in a full training; `wanted` names the key that says so."""

    def chosen(draft: Draft, key: str, value: Any) -> None:
        if draft.given.get(wanted) in (None, False, "full", "freeze"):
            draft.say(key, value, "not needed", f"no adapter is trained ({wanted})")
        else:
            rule(draft, key, value)

    return chosen


def four_bits(draft: Draft, key: str, value: Any) -> None:
    """A base in 4 bits."""
    draft.mapped(key, value, {"model.quantization": "nf4"})


EIGHT_BITS = missing("model.quantization: nf4 keeps the base in 4 bits; 8 bits are not known")


def losses(draft: Draft, key: str, value: Any) -> None:
    """A loss of pairs, or several with weights."""
    names = listed(value)
    if any(one not in PAIRS for one in names):
        draft.say(key, value, "unsupported", f"choose task.loss: {', '.join(PAIRS)}")
        return
    weights = draft.given.get("loss_weights") or [1.0] * len(names)
    given: Any = names[0]
    if len(names) > 1:
        given = [{"name": name, "weight": number(weight)} for name, weight in zip(names, weights, strict=False)]
    draft.mapped(key, value, {"task.loss": given})


BETA = by_kind(
    {
        "llm.dpo": to("task.beta", number),
        "llm.kto": to("task.beta", number),
        "llm.grpo": to("task.kl.weight", number),
        "llm.distill": to("task.mixture", number),
    }
)
"""`beta`, which means something else in each training."""


def packed(draft: Draft, length: str = "data.max_length") -> None:
    """The size of a packed batch: as many tokens as the tool's batch of packed rows has."""
    if not draft.get("data.batch.packing"):
        return
    rows, tokens = int(draft.get("data.batch.examples", 1)), draft.get(length)
    if tokens is None:
        draft.drop("data.batch.packing")
        draft.say(
            "(packing)", True, "unsupported", "set data.max_length, data.batch.tokens and data.batch.packing: true"
        )
        return
    draft.drop("data.batch.examples")
    draft.put("data.batch.tokens", rows * int(tokens))
    draft.say("(packing)", True, "mapped", f"data.batch.tokens: {rows * int(tokens)} ({rows} rows of {tokens} tokens)")


def rollouts(draft: Draft) -> None:
    """Sizes of online training: the tools count completions in a batch, we count prompts."""
    if draft.kind == "llm.grpo":
        _grouped(draft)
    if draft.kind in ("llm.grpo", "llm.ppo"):
        _lengths(draft)


def _grouped(draft: Draft) -> None:
    group = int(draft.get("rollout.num_generations", 8))
    rows, windows = int(draft.get("data.batch.examples", 8)), int(draft.get("train.accumulate", 1))
    examples, accumulate = (rows // group, windows) if rows >= group else (1, max(1, rows * windows // group))
    draft.put("data.batch.examples", examples)
    draft.put("train.accumulate", accumulate)
    draft.say(
        "(batch)", None, "mapped",
        f"data.batch.examples: {examples}, train.accumulate: {accumulate} (prompts, each with {group} completions; "
        f"{rows} completions in {windows} batches there)",
    )  # fmt: skip


def _lengths(draft: Draft) -> None:
    prompt, answer = draft.get("data.max_length"), int(draft.get("rollout.max_new_tokens", 256))
    if prompt is not None:
        draft.put("data.max_length", int(prompt) + answer)
        draft.say(
            "(length)", None, "mapped", f"data.max_length: {int(prompt) + answer} (of a prompt with its completion)"
        )
    elif answer >= 2048:
        draft.default("data.max_length", answer + 512)


REWARDS: dict[str, dict[str, Any]] = {
    "accuracy": {"kind": "number"},
    "accuracy_reward": {"kind": "number"},
    "reasoning_accuracy_reward": {"kind": "number"},
    "format": {"kind": "format"},
    "think_format_reward": {"kind": "format", "tags": ["think"]},
    "soft_overlong": {"kind": "overlong", "max_length": 512, "cache": 128},
    "get_soft_overlong_punishment": {"kind": "overlong", "max_length": 1280, "cache": 256},
    "repetition": {"kind": "repetition"},
}
"""Reward functions that come with the tools, and ours that judge the same."""


def rewards(draft: Draft, key: str, value: Any) -> None:
    """Reward functions, with the weights of their own key; a path to one's own function becomes `module:function`."""
    names = value if isinstance(value, list) else listed(value)
    weights = draft.given.get("reward_weights") or (draft.given.get("trl") or {}).get("reward_weights") or []
    found: list[dict[str, Any]] = list(draft.get("rewards", []))
    for at, name in enumerate(map(str, names)):
        weight = {"weight": number(weights[at])} if at < len(weights) else {}
        place, _, function = name.rpartition(".")
        if name in REWARDS:
            found.append({**REWARDS[name], **weight})
            draft.say(f"{key}[{at}]", name, "mapped", f"rewards: {found[-1]}; compare what both ask for")
        elif place:
            found.append({"kind": "function", "function": f"{place}:{function}", **weight})
            draft.say(
                f"{key}[{at}]", name, "mapped",
                f"rewards: {found[-1]}; the function is called as score(answers), see rewards.function",
            )  # fmt: skip
        else:
            draft.say(f"{key}[{at}]", name, "unsupported", "write it as a function: rewards: [{kind: function, ...}]")
    draft.put("rewards", found)


def sources(draft: Draft, place: str, found: Iterable[Any]) -> None:
    """Data sets of the recipe: one as it is, several as a list."""
    listed_ = list(found)
    if listed_:
        draft.put(place, listed_[0] if len(listed_) == 1 else listed_)


VLLM = missing(
    "rollout.engine: {server: vllm, urls: [...]} lets servers draw completions; else the model in the trainer's own "
    "process does"
)

SCALE = {"group": "group", "batch": "batch", "none": "none", True: "group", False: "none", "true": "group"}

GRPO: dict[str, Rule] = {
    "num_generations": to("rollout.num_generations", whole),
    "max_completion_length": to("rollout.max_new_tokens", whole),
    "temperature": to("rollout.temperature", number),
    "top_p": to("rollout.top_p", number),
    "top_k": unless_off(
        lambda draft, key, value: (
            draft.mapped(key, value, {"rollout.top_k": whole(value)})
            if whole(value) > 0
            else draft.say(key, value, "not needed", "all tokens, as here")
        )
    ),
    "min_p": missing("rollout.top_p and rollout.top_k cut the distribution"),
    "repetition_penalty": lambda draft, key, value: (
        draft.say(key, value, "not needed", "1 is none")
        if value in (1, 1.0, None)
        else draft.say(key, value, "unsupported", "give a reward against repetition: rewards: [{kind: repetition}]")
    ),
    "num_iterations": to("rollout.iterations", whole),
    "steps_per_generation": missing("rollout.steps: optimizer steps that share a rollout; here one"),
    "epsilon": to("task.clip_low", number),
    "epsilon_high": to("task.clip_high", number),
    "delta": unless_off(to("task.ratio_cap", number)),
    "scale_rewards": choice("task.scale", SCALE),
    "mask_truncated_completions": to("task.mask_truncated", flag),
    "importance_sampling_level": lambda draft, key, value: (
        draft.say(key, value, "not needed", "as here")
        if value == "token"
        else draft.mapped(key, value, {"task.loss": "gspo"}, "one ratio for a completion, with the clips of GSPO")
    ),
    "reward_weights": lambda draft, key, value: draft.say(key, value, "mapped", "rewards[].weight"),
    "log_completions": lambda draft, key, value: draft.say(key, value, "not needed", "all are in OUTPUT/rollouts"),
    "sync_ref_model": missing("the reference stays as it is"),
    "ref_model_mixup_alpha": lambda draft, key, value: draft.say(key, value, "not needed", "only with sync_ref_model"),
    "ref_model_sync_steps": lambda draft, key, value: draft.say(key, value, "not needed", "only with sync_ref_model"),
    "use_vllm": VLLM,
    "generation_batch_size": missing("rollout.batch: most completions that are drawn at a time"),
    "dynamic_sample": unless_off(to("task.zero_variance", lambda value: "resample")),
    "entropy_coef": unless_off(to("task.entropy_weight", number)),
}
"""Keys of online training, by TRL's names, which ms-swift and Axolotl use too."""


def _clips(draft: Draft, key: str, value: Any) -> None:
    draft.mapped(key, value, {"task.clip_low": number(value), "task.clip_high": number(value)})


def rewarded(draft: Draft, key: str, value: Any) -> None:
    """One reward model or several, after the rewards that are there."""
    models = [{"kind": "model", "path": one} for one in listed(value)]
    draft.mapped(key, value, {"rewards": [*draft.get("rewards", []), *models]})


PPO: dict[str, Rule] = {
    name: by_kind({"llm.ppo": rule})
    for name, rule in {
        "num_ppo_epochs": to("rollout.iterations", whole),
        "num_mini_batches": to("rollout.steps", whole),
        "response_length": to("rollout.max_new_tokens", whole),
        "kl_coef": to("task.kl.weight", number),
        "cliprange": _clips,
        "vf_coef": to("task.value_weight", number),
        "cliprange_value": to("task.value_clip", number),
        "gamma": to("task.gamma", number),
        "lam": to("task.gae_lambda", number),
        "whiten_rewards": missing("task.whiten gives advantages, not rewards, mean 0 and deviation 1"),
        "missing_eos_penalty": missing("a reward of kind overlong or function"),
    }.items()
}
"""Keys of PPO, by TRL's names, which ms-swift uses too."""


def online_loss(draft: Draft, key: str, value: Any) -> None:
    names = {one: one for one in ONLINE}
    choice("task.loss", names)(draft, key, value)


def need(draft: Draft, place: str, do: str) -> None:
    """Say that something without which there is no recipe is not in the file."""
    if is_off(draft.get(place)):
        draft.say("(not given)", None, "unsupported", f"{place}: {do}")
