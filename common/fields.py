"""The fields of a recipe's sections by their places, such as `optim.learning_rate`."""

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """All sections that a type names, wherever they stand in it."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in getattr(annotation, "__args__", ()) for found in sections_in(part)]


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field is, or may be; None for values, and for lists and choices of sections."""
    parts = [annotation]
    if get_origin(annotation) in (Union, UnionType):
        parts = [part for part in get_args(annotation) if part is not NoneType]
    alone = parts[0] if len(parts) == 1 else None
    return alone if isinstance(alone, type) and issubclass(alone, BaseModel) else None


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """(place, field) of every value in a recipe, those of sections that may be absent too, in their order."""
    for name, info in model.model_fields.items():
        inner = section_of(info.annotation)
        if inner is None:
            yield f"{prefix}{name}", info
        else:
            yield from fields(inner, f"{prefix}{name}.")


def field_at(model: type[BaseModel], place: str) -> FieldInfo | None:
    """The field or section at a place; None if there is none."""
    name, _, rest = place.partition(".")
    info = model.model_fields.get(name)
    if info is None or not rest:
        return info
    inner = section_of(info.annotation)
    return field_at(inner, rest) if inner else None
