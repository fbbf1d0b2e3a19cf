"""A plugin's options as text, read from its pydantic model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import formatannotation
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from chatlearn_core.plugins.table import table

OPTIONS_HEADER = ("OPTION", "TYPE", "DEFAULT", "")
BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "multiple_of": "multiple of"}
LENGTHS = {"min_length": "at least", "max_length": "at most"}
LONGEST_DEFAULT = 60
"""Number of characters of a default that the table shows; ``--json`` shows the whole default."""


@dataclass(slots=True, frozen=True)
class OptionRow:
    """One option; options of a nested model have dotted names."""

    name: str
    type: str
    """Type with bounds: ``int >= 1 | null``."""
    default: str
    """``required`` if there is none."""
    description: str


def option_rows(model: type[BaseModel], prefix: str = "") -> list[OptionRow]:
    """Every option of a model in declaration order; options of a nested model directly follow the one that holds it."""
    rows = []
    for name, field in model.model_fields.items():
        key = prefix + (field.alias or name)
        rows.append(OptionRow(key, type_text(field), default_text(field), field.description or ""))
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel) and nested is not model:
            rows += option_rows(nested, f"{key}.")
    return rows


def type_text(field: FieldInfo) -> str:
    """The values a user may write, with bounds: ``int >= 1 | null``."""
    return annotation_text(field.annotation, field.metadata)


def annotation_text(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """An annotation in terms of a configuration file; bounds are shown with its first alternative."""
    arguments = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return annotation_text(arguments[0], [*arguments[1:], *metadata])
    if get_origin(annotation) in (Union, UnionType):
        first, *others = arguments
        return " | ".join([annotation_text(first, metadata), *map(annotation_text, others)])
    if get_origin(annotation) is Literal:
        text = " | ".join(map(str, arguments))
    elif annotation in (None, NoneType):
        text = "null"
    else:
        text = formatannotation(annotation, base_module=getattr(annotation, "__module__", None))
    return " ".join([text, *bounds(metadata)])


def bounds(metadata: Sequence[Any]) -> Iterator[str]:
    """Bounds of a value as text: ``>= 1``."""
    for constraint in flatten(metadata):
        for attribute, sign in BOUNDS.items():
            if (bound := getattr(constraint, attribute, None)) is not None:
                yield f"{sign} {bound}"
        for attribute, words in LENGTHS.items():
            if (length := getattr(constraint, attribute, None)) is not None:
                yield f"({words} {length} long)"


def flatten(metadata: Sequence[Any]) -> Iterator[Any]:
    """All constraints, including those nested in ``Field(...)``."""
    for constraint in metadata:
        if isinstance(constraint, FieldInfo):
            yield from flatten(constraint.metadata)
        else:
            yield constraint


def default_text(field: FieldInfo) -> str:
    """Return the default roughly as YAML would show it, on one line and shortened if it is long."""
    if field.is_required():
        return "required"
    if field.default_factory is not None and field.default_factory_takes_validated_data:
        return "from other options"
    default = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, BaseModel):
        return "see below"
    text = "null" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
    if "\n" in text:
        text = json.dumps(text, ensure_ascii=False)
    return text if len(text) <= LONGEST_DEFAULT else f"{text[: LONGEST_DEFAULT - 3]}..."


def options_text(rows: Sequence[OptionRow]) -> str:
    """A table of options."""
    if not rows:
        return "no options"
    return table(OPTIONS_HEADER, [(row.name, row.type, row.default, row.description) for row in rows])
