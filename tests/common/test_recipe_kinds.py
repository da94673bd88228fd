"""The recipe of every kind: all of it is described, frozen and strict; and the recipes that ship."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel

from luthier.common import kinds, reading
from luthier.common.errors import RecipeError

# ------------------------------------------------------------------------------------------------ the models


def sections(annotation: Any) -> list[type[BaseModel]]:
    """Every section within an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in sections(part)]


def walked(model: type[BaseModel], path: str = "") -> list[tuple[str, type[BaseModel], str, Any]]:
    """(path, section, field name, field) of all fields, nested."""
    found = []
    for name, field in model.model_fields.items():
        here = f"{path}.{name}".lstrip(".")
        found.append((here, model, name, field))
        for inner in sections(field.annotation):
            found += walked(inner, here)
    return found


@pytest.mark.parametrize("kind", kinds.names())
def test_every_value_of_every_kind_is_described(kind: str) -> None:
    fields = walked(kinds.config(kind))
    assert len(fields) > 50
    bare = [path for path, _, _, field in fields if not sections(field.annotation) and not field.description]
    assert not bare
    short = [path for path, _, _, field in fields if field.description and len(field.description) < 10]
    assert not short


@pytest.mark.parametrize("kind", kinds.names())
def test_every_section_of_every_kind_is_described(kind: str) -> None:
    fields = [entry for entry in walked(kinds.config(kind)) if sections(entry[3].annotation)]
    bare = [
        path
        for path, _, _, field in fields
        if not field.description and not any(inner.__doc__ for inner in sections(field.annotation))
    ]
    assert not bare


@pytest.mark.parametrize("kind", kinds.names())
def test_every_section_is_frozen_strict_about_keys_and_finite(kind: str) -> None:
    models = {model for _, model, _, _ in walked(kinds.config(kind))}
    for model in models:
        found = {key: model.model_config.get(key) for key in ("frozen", "extra", "allow_inf_nan")}
        assert found == {"frozen": True, "extra": "forbid", "allow_inf_nan": False}, model


@pytest.mark.parametrize("kind", kinds.names())
def test_values_are_hashable_through_and_through(kind: str) -> None:
    """A list inside a frozen section could still be changed."""
    for path, _, _, field in walked(kinds.config(kind)):
        assert get_origin(field.annotation) not in (list, dict, set), path
        if get_origin(field.annotation) in (Union, types.UnionType):
            assert not {get_origin(part) for part in get_args(field.annotation)} & {list, dict, set}, path


@pytest.mark.parametrize("kind", kinds.names())
def test_a_json_schema_can_be_made(kind: str) -> None:
    schema = kinds.config(kind).model_json_schema()
    json.dumps(schema)
    assert set(schema["required"]) >= {"task", "model", "data", "output"}
    assert schema["additionalProperties"] is False
    section = schema["$defs"]["OptimSection"]["properties"]["learning_rate"]
    assert section["description"] == "Peak learning rate."
    assert section["exclusiveMinimum"] == 0


@pytest.mark.parametrize("name", ["asr/whisper", "llm/dpo"])
def test_a_dump_holds_every_field(name: str) -> None:
    recipe = reading.load(name)
    dumped = yaml.safe_load(recipe.dump())
    for part, field in type(recipe).model_fields.items():
        inner = sections(field.annotation)
        assert part in dumped
        if inner and isinstance(dumped[part], dict):
            assert set(dumped[part]) == set(type(getattr(recipe, part)).model_fields)


# ------------------------------------------------------------------------------------------------ those that ship


def test_some_recipes_ship() -> None:
    assert {"asr/whisper", "asr/whisper-lora"} <= set(reading.shipped())


@pytest.mark.parametrize("name", list(reading.shipped()))
def test_every_shipped_recipe_is_valid_under_all_its_names(name: str) -> None:
    loaded = reading.load(name)
    assert loaded == reading.load(f"recipes/{name}.yaml") == reading.load(reading.shipped()[name])
    assert loaded.task.kind.split(".")[0] == name.split("/")[0]


def test_an_unknown_recipe_suggests_the_nearest() -> None:
    with pytest.raises(RecipeError, match=r"did you mean asr/whisper\?") as caught:
        reading.load("asr/whispr")
    assert "given:    asr/whispr" in str(caught.value)
    assert "luthier recipes list" in str(caught.value)
    with pytest.raises(RecipeError, match="no such recipe"):
        reading.load("nothing-of-the-kind")


def test_a_folder_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no such recipe"):
        reading.load(tmp_path)
