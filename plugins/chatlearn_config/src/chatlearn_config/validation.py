"""Turns pydantic's validation errors into problems with the keys of the file and the nearest valid names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from chatlearn_config.fields import model_at, valid_keys
from chatlearn_config.problems import UNSET, KeyPath, Problem, nearest, unknown_key

_SCALAR_ERRORS = ("int_type", "float_type", "bool_type")
_QUOTED = re.compile(r"'([^']*)'")


def problems_of(error: ValidationError, model: type[BaseModel], values: Any, prefix: KeyPath = ()) -> list[Problem]:
    """One problem per key, in pydantic's order; several rules on one key (a union) are joined by 'or'.

    Args:
        error: the error that ``model`` raised.
        model: the model that validated.
        values: the validated values, to distinguish keys from names that pydantic adds to a location.
        prefix: the path of ``values`` in the configuration.
    """
    found: dict[KeyPath, Problem] = {}
    errors = error.errors(include_url=False)
    for details in errors:
        if _is_short_of_valid_items(details, errors):
            continue
        problem = _problem(details, model, values, prefix)
        earlier = found.get(problem.path)
        if earlier is None:
            found[problem.path] = problem
        elif problem.rule not in earlier.rule:
            joined = f"{earlier.rule}; or {problem.rule}"
            found[problem.path] = Problem(problem.path, joined, earlier.value, earlier.remedy or problem.remedy)
    return list(found.values())


def _is_short_of_valid_items(details: ErrorDetails, errors: Sequence[ErrorDetails]) -> bool:
    """Whether enough items were given, and only bad ones, which have errors of their own, make the sequence short:
    pydantic counts the valid ones.
    """
    if details["type"] != "too_short" or len(details["input"]) < details["ctx"]["min_length"]:
        return False
    place = details["loc"]
    return any(len(other["loc"]) > len(place) and other["loc"][: len(place)] == place for other in errors)


def _problem(details: ErrorDetails, model: type[BaseModel], values: Any, prefix: KeyPath) -> Problem:
    kind, value = details["type"], details["input"]
    path = _known(details["loc"], values)
    if kind == "missing":
        path = details["loc"]
        return Problem((*prefix, *path), "required key is missing", remedy=_describe(model, path))
    if kind == "extra_forbidden":
        section = model_at(model, path[:-1])
        return unknown_key((*prefix, *path), value, valid_keys(section) if section else [])
    remedy = ""
    if kind in _SCALAR_ERRORS and isinstance(value, str):
        remedy = _unquote(value, kind)
    elif kind == "string_type" and isinstance(value, int | float):
        remedy = "put it in quotes: YAML reads numbers, true, false, yes, no, on and off as something else than text"
    elif kind in ("literal_error", "enum") and isinstance(value, str):
        guess = nearest(value, _QUOTED.findall(str(details.get("ctx", {}).get("expected", ""))))
        remedy = f"did you mean '{guess}'?" if guess else ""
    elif value is None:
        remedy = "give it a value, or remove the key to have the default"
    rule = _rule(details)
    return Problem((*prefix, *path), rule, UNSET if isinstance(value, Mapping) and path == () else value, remedy)


def _rule(details: ErrorDetails) -> str:
    if details["type"] in ("model_type", "dict_type", "model_attributes_type"):
        return "must be a mapping of keys to values"
    if details["type"] == "list_type":
        return "must be a list"
    if details["type"] == "too_short":
        return f"must have at least {details['ctx']['min_length']} item(s)"
    message = details["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if message.startswith("Input should be "):
        return f"must be {message.removeprefix('Input should be ')}"
    return message


def _unquote(text: str, kind: str) -> str:
    if kind == "bool_type":
        readable = text.lower() in ("true", "false", "yes", "no", "on", "off")
    else:
        try:
            float(text)
            readable = True
        except ValueError:
            readable = False
    return "write it without quotes; from the environment: ${oc.decode:${oc.env:NAME}}" if readable else ""


def _known(location: Sequence[str | int], values: Any) -> KeyPath:
    """The part of pydantic's location that is a path in the file, without union branches and ``[key]``."""
    path: list[str | int] = []
    for part in location:
        if isinstance(values, Mapping):
            key = next((key for key in (part, _as_number(part)) if key in values), None)
        else:
            key = part if isinstance(values, list) and isinstance(part, int) and part < len(values) else None
        if key is not None:
            values = values[key]
            path.append(key)
    return tuple(path)


def _as_number(part: str | int) -> str | int:
    """The key as a number if possible: JSON keys are text, but keys of a file may be numbers."""
    return int(part) if isinstance(part, str) and part.isascii() and part.isdigit() else part


def _describe(model: type[BaseModel], path: Sequence[str | int]) -> str:
    section = model_at(model, tuple(path[:-1]))
    info = section.model_fields.get(str(path[-1])) if section else None
    return info.description or "" if info else ""
