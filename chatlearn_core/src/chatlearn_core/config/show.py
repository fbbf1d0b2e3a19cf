"""A checked configuration as plain values that can be written to a file and loaded again."""

from __future__ import annotations

from typing import Any

import yaml

from chatlearn_core.config.load import LoadedConfig


def resolved_values(loaded: LoadedConfig) -> dict[str, Any]:
    """Every setting of a run: interpolations resolved, defaults filled in, plugin options included.

    Text that contains ``${`` is escaped, so that loading it again gives the same configuration.
    """
    values: dict[str, Any] = loaded.config.model_dump(mode="json")
    for key, choice in loaded.choices.items():
        section: Any = values
        for part in _path(key, values):
            section = section[part]
        section["options"] = choice.options.model_dump(mode="json", by_alias=True)
    return escaped(values)


def escaped(values: dict[str, Any]) -> dict[str, Any]:
    """The same values with every ``${`` escaped as a literal."""
    result: dict[str, Any] = _escape(values)
    return result


def to_yaml(values: dict[str, Any]) -> str:
    """The values as YAML, keys in the order of the models."""
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)
    return text


def _path(key: str, values: dict[str, Any]) -> list[str | int]:
    """The keys of a dotted path; digits are indices if they address a list."""
    path: list[str | int] = []
    section: Any = values
    for part in key.split("."):
        step: str | int = int(part) if isinstance(section, list) else part
        section = section[step]
        path.append(step)
    return path


def _escape(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _escape(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_escape(child) for child in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value
