"""Checks JSON Schemas, and JSON against them, in the worker processes of reward ``json_schema``.

A schema's patterns may backtrack endlessly, so the workers that match them can be killed. A ``$ref`` resolves inside
the schema itself, never over a network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

BLOCK = re.compile(r"^[ \t]*```[ \t]*(?:json)?[ \t]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL | re.IGNORECASE)
MAX_CHARACTERS = 1 << 20
"""A longer completion counts as not JSON."""


def schema_problem(schema: Any) -> str | None:
    """Return why this is not a JSON Schema, worded to follow its name; None if it is one."""
    if not isinstance(schema, dict | bool):
        return f"is a {type(schema).__name__}; it must be an object, or true or false"
    try:
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except SchemaError as error:
        return f"is not a JSON Schema: at {error.json_path}: {error.message[:200]}"
    except (RecursionError, re.error) as error:
        return f"is not a JSON Schema: {error}"
    return None


def read_schema(text: Any) -> Any:
    """Return the schema of a row, from an object or its JSON text.

    Raises:
        ValueError: the text is not JSON.
    """
    if not isinstance(text, str):
        return dict(text) if isinstance(text, Mapping) else text
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def build_checker(take: str) -> Callable[[Mapping[str, Any]], str]:
    """Return a function that maps ``{"text", "schema"}`` to ``valid``, ``invalid`` or ``not_json``."""

    def check(payload: Mapping[str, Any]) -> str:
        schema = payload["schema"]
        blocks = BLOCK.findall(payload["text"]) if take == "block" else []
        text = blocks[-1] if blocks else payload["text"]
        try:
            if len(text) > MAX_CHARACTERS:
                return "not_json"
            value = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return "not_json"
        validator = validator_for(schema, default=Draft202012Validator)(schema, registry=Registry())
        try:
            return "valid" if validator.is_valid(value) else "invalid"
        except Unresolvable as error:
            raise ValueError(f"its schema refers to {error.ref!r}, which it does not define") from error
        except RecursionError:
            return "invalid"

    return check


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
