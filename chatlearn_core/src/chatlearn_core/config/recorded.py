"""A run's settings as written to its files: resolved, with defaults, and without values from the environment.

``${oc.env:HF_TOKEN}`` is written as in the configuration, so that no file of a run holds a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from chatlearn_config.problems import KeyPath
from chatlearn_core.config.load import LoadedConfig
from chatlearn_core.config.show import escaped

_FROM_ENVIRONMENT = "${oc.env:"
_REFERENCE = re.compile(r"\$\{(\.*)([^${}:]+)\}")
"""A reference to another setting: ``${a.b}``, or ``${.b}`` relative to its own place."""


def recorded_values(loaded: LoadedConfig) -> dict[str, Any]:
    """Every setting with its default, as a configuration file that gives the same run in the same environment."""
    values: dict[str, Any] = escaped(loaded.config.model_dump(mode="json"))
    for path, text in environment_texts(loaded.written, loaded.resolved).items():
        section: Any = values
        for part in path[:-1]:
            section = section[_key(section, part)]
        section[_key(section, path[-1])] = text
    return values


def _key(section: Any, part: str | int) -> str | int:
    """Convert a key as in JSON, where whole numbers are text."""
    return part if isinstance(section, list) else str(part)


def environment_texts(written: Mapping[Any, Any], resolved: Mapping[Any, Any]) -> dict[KeyPath, str]:
    """The settings whose text comes from environment variables, directly or through other settings, as written.

    Numbers read from the environment (``${oc.decode:${oc.env:N}}``) are not secret and are not included.

    Args:
        written: values with interpolations.
        resolved: the same values without interpolations.
    """
    texts = {path: text for path, text in _texts(written, ()) if "${" in text}
    kept = {
        path: text
        for path, text in texts.items()
        if _FROM_ENVIRONMENT in text and isinstance(_value_at(resolved, path), str)
    }
    while further := {path: text for path, text in texts.items() if path not in kept and _refers(path, text, kept)}:
        kept |= further
    return kept


def _texts(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """Every text in a value, with its path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping | list):
        for key, child in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _texts(child, (*path, key))


def _value_at(values: Any, path: KeyPath) -> Any:
    for part in path:
        values = values[part]
    return values


def _refers(path: KeyPath, text: str, kept: Mapping[KeyPath, str]) -> bool:
    """Whether a text inserts one of these settings, or a section that holds one."""
    for dots, name in _REFERENCE.findall(text):
        base = path[: -len(dots)] if dots else ()
        target = tuple(str(part) for part in (*base, *re.split(r"[.\[\]]+", name.strip("]"))))
        if any(tuple(map(str, other[: len(target)])) == target for other in kept):
            return True
    return False
