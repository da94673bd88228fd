"""Axolotl's lists of data sets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .draft import Draft, Rule, is_off
from .language import sources

_COLUMNS = {
    "field_messages": ("messages", "conversations"), "field": ("text",), "field_tools": ("tools",),
    "field_system": ("system",), "field_instruction": ("instruction",), "field_input": ("input",),
    "field_output": ("output",), "field_prompt": ("prompt",), "field_chosen": ("chosen",),
    "field_rejected": ("rejected",), "field_completion": ("completion",), "field_label": ("label",),
    "text_column": ("text",), "message_field_role": ("role", "from"), "message_field_content": ("content", "value"),
    "message_field_training": ("train",), "field_thinking": ("reasoning_content",),
}  # fmt: skip
"""Keys that name a column, and the names under which it is known."""
_ROLES = {
    "system": {"system"}, "user": {"user", "human"}, "assistant": {"assistant", "gpt"},
    "tool": {"tool", "observation", "function_response"},
}  # fmt: skip
"""Roles, and the names that rows may have for them."""


def datasets(place: str) -> Rule:
    """`datasets`, `test_datasets` and `pretraining_dataset`: what becomes of each key of each of them."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        sets = value if isinstance(value, list) else [value]
        sets = [{"path": one} if isinstance(one, str) else one for one in sets]
        for at, one in enumerate(sets):
            for name, given in one.items():
                _column(draft, f"{key}[{at}].{name}", str(name), given, one)
        sources(draft, place, [source for one in sets for source in _sources(one)])

    return rule


def _sources(one: Mapping[str, Any]) -> list[Any]:
    """The files of a data set; a data set without any is one by its path."""
    files, folder, split = one.get("data_files") or [], one.get("path"), one.get("split")
    files = [files] if isinstance(files, str) else files
    if folder not in (None, "json", "csv", "parquet", "text"):
        files = [str(Path(str(folder)) / str(file)) for file in files]
    local = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
    return [
        {"path": path, "split": split} if split and Path(str(path)).suffix not in local else path
        for path in files or [folder]
    ]


def _column(draft: Draft, key: str, name: str, value: Any, one: Mapping[str, Any]) -> None:
    if name in ("path", "data_files"):
        draft.say(key, value, "mapped", f"path of a data set: {', '.join(map(str, _sources(one)))}")
    elif name in ("name", "revision") and not is_off(value):
        draft.say(key, value, "unsupported", "save that part of the data set as a file, and name it")
    elif name == "roles" and all(set(said or ()) <= _ROLES.get(str(role), set()) for role, said in value.items()):
        draft.say(key, value, "not needed", "known by these names")
    elif name == "split":
        told = f"split: {value}" if any(isinstance(source, dict) for source in _sources(one)) else ""
        draft.say(key, value, "mapped" if told else "not needed", told or "a file has no splits")
    elif name in ("ds_type", "trust_remote_code", "name", "revision") and (name in ("ds_type",) or is_off(value)):
        draft.say(key, value, "not needed", "told by the file's name" if name == "ds_type" else "off, as it is here")
    elif name == "type" and isinstance(value, Mapping):
        for inner, given in value.items():
            _column(draft, f"{key}.{inner}", str(inner), given, one)
    elif name == "type":
        rows = value is None or not str(value).startswith(("input_output", "user_defined", "sharegpt:chat"))
        told = "rows are recognised by their keys" if rows else "write the rows as messages, or prompt and completion"
        draft.say(key, value, "not needed" if rows else "unsupported", told)
    elif name in _COLUMNS:
        known = value in _COLUMNS[name]
        told = "the name that is looked for" if known else f"rename the column to {' or '.join(_COLUMNS[name])}"
        draft.say(key, value, "not needed" if known else "unsupported", told)
    elif name == "message_property_mappings" and isinstance(value, Mapping):
        known = dict(value) in ({"role": "role", "content": "content"}, {"role": "from", "content": "value"})
        told = "role and content, or from and value, as is known" if known else "rename them to role and content"
        draft.say(key, value, "not needed" if known else "unsupported", told)
    elif name == "roles_to_train" and value:
        if draft.kind == "llm.sft":
            draft.mapped(key, value, {"data.roles": [{"gpt": "assistant", "human": "user"}.get(r, r) for r in value]})
        else:
            draft.say(key, value, "not needed", "means nothing in this training")
    elif name == "train_on_eos" and value in (None, "turn"):
        draft.say(key, value, "not needed", "the end of a turn that carries loss carries it too")
    elif name == "chat_template":
        template(draft, key, value)
    elif name == "step_separator":
        draft.mapped(key, value, {"task.step_separator": value})
    elif is_off(value):
        draft.say(key, value, "not needed", "off, as it is here")
    else:
        draft.say(key, value, "unsupported", "prepare the data so that its rows have a known shape")


def template(draft: Draft, key: str, value: Any) -> None:
    """`chat_template`, of the run or of a data set."""
    if value in (None, "tokenizer_default") or str(value).startswith("tokenizer_default"):
        draft.say(key, value, "not needed", "the tokenizer's own template is used")
    elif value == "jinja":
        draft.say(key, value, "not needed", "said by chat_template_jinja")
    else:
        draft.say(
            key, value, "unsupported", "the tokenizer's own template is used; for another, data.chat_template: FILE"
        )
