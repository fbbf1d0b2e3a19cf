"""The keys that a pydantic model accepts at a path, with which unknown keys are compared."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Union

from pydantic import BaseModel

from chatlearn_config.problems import KeyPath


def model_at(model: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    """The model of the section at ``path``; None if there is none, or if it is a free mapping.

    The search descends through lists, mappings and optional sections: ``("roles", "trainer", "model")`` of a run's
    configuration is ``ModelConfig``. In a union of sections, the first one that has the next key is used.
    """
    annotation: Any = model
    for part in path:
        annotation = _step(annotation, part)
        if annotation is None:
            return None
    return next(_models(annotation), None)


def valid_keys(model: type[BaseModel]) -> list[str]:
    """The keys as written in a file: aliases if there are any."""
    return [info.alias or name for name, info in model.model_fields.items()]


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    for option in _options(annotation):
        if isinstance(option, type) and issubclass(option, BaseModel):
            yield option


def _options(annotation: Any) -> Iterator[Any]:
    origin = typing.get_origin(annotation)
    if origin in (Union, types.UnionType):
        for option in typing.get_args(annotation):
            yield from _options(option)
    elif origin is typing.Annotated:
        yield from _options(typing.get_args(annotation)[0])
    else:
        yield annotation


def _step(annotation: Any, part: str | int) -> Any:
    """The annotation below one key or index, or None."""
    for option in _options(annotation):
        origin, arguments = typing.get_origin(option), typing.get_args(option)
        if isinstance(option, type) and origin is None and issubclass(option, BaseModel):
            for name, info in option.model_fields.items():
                if part in (name, info.alias):
                    return info.annotation
        elif isinstance(origin, type) and issubclass(origin, Mapping) and len(arguments) == 2:
            return arguments[1]
        elif isinstance(origin, type) and issubclass(origin, Sequence | set | frozenset) and arguments:
            return arguments[0]
    return None
