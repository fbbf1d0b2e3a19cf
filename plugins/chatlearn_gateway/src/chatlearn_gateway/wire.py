"""What the bodies of the three protocols share."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for

from chatlearn_gateway.chat import SAMPLING, RefusedError

Json = dict[str, Any]


@dataclass(slots=True, frozen=True)
class ServedBy:
    """What a response says about its server."""

    model: str
    session: str
    """Part of the ids of responses."""
    time_s: int
    """Seconds since 1970."""


def refuse_parameters(
    given: Mapping[str, Any] | None, accepted: Collection[str], neutral: Mapping[str, Sequence[Any]]
) -> None:
    """Refuse parameters that would change the answer, which this server cannot do.

    Args:
        given: parameters that the model of the body does not name.
        accepted: parameters without effect on the answer, and those that the caller handles.
        neutral: values that change nothing, by parameter.

    Raises:
        RefusedError: names the parameter.
    """
    for name, value in (given or {}).items():
        if value is None or name in accepted or value in neutral.get(name, ()):
            continue
        known = f"; only {neutral[name][0]!r} is" if name in neutral else ""
        raise RefusedError("invalid", f"parameter {name}={value!r:.80} is not supported{known}. Leave it out", name)


def sampling_of(given: Mapping[str, Any] | None) -> dict[str, float]:
    """The parameters of ``SAMPLING`` that a request sets.

    Raises:
        RefusedError: one is no number; names it.
    """
    found: dict[str, float] = {}
    for name in SAMPLING:
        value = (given or {}).get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RefusedError("invalid", f"{name} is {value!r:.80}; it must be a number", name)
        found[name] = value
    return found


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Check that the parameters of tools are JSON Schemas of objects, which chat templates and agents rely on.

    Raises:
        RefusedError: those of one are not; names the tool and the place.
    """
    for tool in tools:
        function = tool["function"]
        if (schema := function.get("parameters")) is None:
            continue
        problem = _schema_problem(json.dumps(schema, sort_keys=True))
        if problem is not None:
            raise RefusedError("invalid", f"the parameters of tool {function['name']!r:.80} are {problem}", "tools")


@lru_cache(maxsize=256)
def _schema_problem(text: str) -> str | None:
    """What is wrong with the JSON of a tool's parameters. Kept, because agents send the same tools again and again."""
    schema = json.loads(text)
    if schema.get("type", "object") != "object":
        return f"not of an object: type is {schema['type']!r:.80}"
    try:
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except SchemaError as error:
        return f"not a JSON Schema: at {error.json_path}: {error.message[:200]}"
    except (RecursionError, re.error) as error:
        return f"not a JSON Schema: {error}"
    return None


def text_of_parts(content: Any, kinds: Collection[str]) -> str:
    """The text of a message's content, which is a text, a list of parts, or nothing.

    Args:
        content: as the client sent it.
        kinds: the types of parts that hold text.

    Raises:
        RefusedError: a part is not text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if part.get("type") not in kinds or not isinstance(part.get("text"), str):
            raise RefusedError(
                "invalid", f"a content part of type {part.get('type')!r} is not supported; only text is", "messages"
            )
        texts.append(part["text"])
    return "".join(texts)
