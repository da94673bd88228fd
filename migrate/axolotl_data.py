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


def datasets(place: str) -> Rule:
    """`datasets`, `test_datasets` and `pretraining_dataset`: what becomes of each key of each of them."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        sets = value if isinstance(value, list) else [value]
        sets = [{"path": one} if isinstance(one, str) else one for one in sets]
        for at, one in enumerate(sets):
            for name, given in one.items():
                _column(draft, f"{key}[{at}].{name}", str(name), given, one)
        sources(draft, place, [_source(one) for one in sets])

    return rule


def _source(one: Mapping[str, Any]) -> Any:
    files = one.get("data_files")
    path = (
        files
        if isinstance(files, str)
        else files[0]
        if isinstance(files, list) and len(files) == 1
        else one.get("path")
    )
    if files and path != one.get("path") and one.get("path") not in (None, "json", "csv", "parquet", "text"):
        path = str(Path(str(one["path"])) / str(path))
    split = one.get("split")
    local = Path(str(path)).suffix in (".jsonl", ".json", ".csv", ".parquet", ".arrow")
    return {"path": path, "split": split} if split and not local else path


def _column(draft: Draft, key: str, name: str, value: Any, one: Mapping[str, Any]) -> None:
    if name in ("path", "data_files"):
        draft.say(key, value, "mapped", f"path of a data set: {_source(one)}")
    elif name == "split":
        told = f"split: {value}" if isinstance(_source(one), dict) else ""
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
