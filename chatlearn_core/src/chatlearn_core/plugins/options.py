"""A plugin's options as text, read from the pydantic model that it supplies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import formatannotation
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from chatlearn_core.plugins.report import table

OPTIONS_HEADER = ("OPTION", "TYPE", "DEFAULT", "")
BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "multiple_of": "multiple of"}
LENGTHS = {"min_length": "at least", "max_length": "at most"}


@dataclass(slots=True, frozen=True)
class OptionRow:
    """One option; those of a nested model have dotted names."""

    name: str
    type: str
    """With its bounds: ``int >= 1``."""
    default: str
    """``required`` if there is none."""
    description: str


def option_rows(model: type[BaseModel], prefix: str = "") -> list[OptionRow]:
    """Every option of a model, in its own order, nested models right after the option that holds them."""
    rows = []
    for name, field in model.model_fields.items():
        key = prefix + (field.alias or name)
        rows.append(OptionRow(key, type_text(field), default_text(field), field.description or ""))
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel) and nested is not model:
            rows += option_rows(nested, f"{key}.")
    return rows


def type_text(field: FieldInfo) -> str:
    """The annotation as a user would write it, with its bounds."""
    if field.annotation is None:
        return "any"
    return " ".join([formatannotation(field.annotation, base_module="builtins"), *bounds(field.metadata)])


def bounds(metadata: Sequence[Any]) -> Iterator[str]:
    """Bounds of a value as text: ``>= 1``."""
    for constraint in metadata:
        for attribute, sign in BOUNDS.items():
            if (bound := getattr(constraint, attribute, None)) is not None:
                yield f"{sign} {bound}"
        for attribute, words in LENGTHS.items():
            if (length := getattr(constraint, attribute, None)) is not None:
                yield f"({words} {length} long)"


def default_text(field: FieldInfo) -> str:
    """The default as it would stand in YAML, roughly."""
    if field.is_required():
        return "required"
    if field.default_factory is not None and field.default_factory_takes_validated_data:
        return "from other options"
    default = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, BaseModel):
        return "see below"
    return "null" if default is None else str(default).lower() if isinstance(default, bool) else str(default)


def options_text(rows: Sequence[OptionRow]) -> str:
    """A table of options."""
    if not rows:
        return "no options"
    return table(OPTIONS_HEADER, [(row.name, row.type, row.default, row.description) for row in rows])
