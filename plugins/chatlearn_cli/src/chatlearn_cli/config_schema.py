"""A JSON schema of run configurations for editors, including the options of the installed plugins.

With the YAML language server, put ``# yaml-language-server: $schema=<file>`` in the first line of a configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from chatlearn_core.config.models import SYNC, RunConfig
from chatlearn_core.exceptions import PluginError
from chatlearn_core.plugins.records import Kind, PluginRecord
from chatlearn_core.plugins.registry import PluginRegistry

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_INTERPOLATION = {"type": "string", "pattern": r"\$\{", "description": "An interpolation such as ${train.steps}."}
_INTERPOLATION_REF = {"$ref": "#/$defs/Interpolation"}

_NAMED_CHOICES: tuple[tuple[str, Kind], ...] = (("AlgorithmChoice", "algorithm"), ("LoggerChoice", "logger"))
_ROLE_KINDS: tuple[Kind, ...] = ("trainer", "generator", "reward")
_CHOOSERS: tuple[tuple[str, Kind, str], ...] = (
    ("RewardPart", "reward", "backend"),
    ("WeightSyncConfig", "weight_sync", "backend"),
    ("RuntimeConfig", "runtime", "backend"),
    ("RolloutConfig", "rollout_mode", "mode"),
    ("DatasetConfig", "dataset", "format"),
)
"""(definition, kind of plugin, key of its name) of sections that choose one kind of plugin."""


def config_schema(registry: PluginRegistry) -> tuple[dict[str, Any], list[str]]:
    """Return the schema, and a line with the reason for each plugin whose options could not be described.

    Every setting also accepts an interpolation, as text.
    """
    schema = RunConfig.model_json_schema()
    definitions: dict[str, Any] = schema["$defs"]
    failures: list[str] = []
    # algorithm and loggers share one section model, but choose different kinds of plugin.
    for definition, kind in _NAMED_CHOICES:
        definitions[definition] = _copy(definitions["PluginChoice"]) | {"title": definition}
        _attach(definitions, definition, kind, "name", registry, failures)
    del definitions["PluginChoice"]
    schema["properties"]["algorithm"] = {"$ref": "#/$defs/AlgorithmChoice"}
    definitions["LogConfig"]["properties"]["loggers"]["items"] = {"$ref": "#/$defs/LoggerChoice"}
    for definition, kind, key in _CHOOSERS:
        _attach(definitions, definition, kind, key, registry, failures)
    for kind in _ROLE_KINDS:
        _attach(definitions, "RoleConfig", kind, "backend", registry, failures, role=True)
    _allow_interpolation(schema)
    for definition in definitions.values():
        _allow_interpolation(definition)
    definitions["Interpolation"] = _INTERPOLATION
    return {"$schema": _DIALECT, **schema, "title": "ChatLearn run configuration"}, failures


def _attach(
    definitions: dict[str, Any],
    definition: str,
    kind: Kind,
    key: str,
    registry: PluginRegistry,
    failures: list[str],
    role: bool = False,
) -> None:
    """Add to a section the available plugin names and the ``options`` of each."""
    section = definitions[definition]
    rules = section.setdefault("allOf", [])
    names = [record.name for record in registry.records(kind)]
    is_kind = {"properties": {"kind": {"const": kind}}, "required": ["kind"]} if role else {}
    known = {"anyOf": [{"enum": [*names, *_automatic(section, key)]}, _INTERPOLATION_REF, {"type": "null"}]}
    offer = {"properties": {key: known}}
    rules.append({"if": is_kind, "then": offer} if role else offer)
    for record, options in _option_models(registry, kind, failures):
        prefix = f"{kind}.{record.name}"
        described = options.model_json_schema(ref_template=f"#/$defs/{prefix}.{{model}}")
        for name, below in described.pop("$defs", {}).items():
            definitions[f"{prefix}.{name}"] = below
        definitions[prefix] = described
        chosen: dict[str, Any] = {"properties": {key: {"const": record.name}}, "required": [key]}
        if section["properties"][key].get("default") == record.name:
            del chosen["required"]
        rules.append(
            {
                "if": {"allOf": [is_kind, chosen]} if role else chosen,
                "then": {"properties": {"options": {"$ref": f"#/$defs/{prefix}"}}},
            }
        )


def _automatic(section: dict[str, Any], key: str) -> list[str]:
    """Names that are no plugin's: what the core decides or does itself."""
    return [name for name in ("auto", SYNC) if section["properties"][key].get("default") == name]


def _option_models(
    registry: PluginRegistry, kind: Kind, failures: list[str]
) -> Iterator[tuple[PluginRecord, type[BaseModel]]]:
    for record in registry.records(kind):
        try:
            model = registry.load_options(record)
            model.model_json_schema()
        except PluginError as error:
            failures.append(str(error))
        except Exception as error:  # a plugin's own schema hooks may raise anything; the others must still be included
            failures.append(f"{kind} '{record.name}': {type(error).__name__}: {error}")
        else:
            yield record, model


def _allow_interpolation(section: dict[str, Any]) -> None:
    properties = section.get("properties", {})
    for name, described in properties.items():
        if described.get("type") == "string" and "enum" not in described and "const" not in described:
            continue
        outer = {key: described[key] for key in ("title", "description", "default") if key in described}
        inner = {key: value for key, value in described.items() if key not in outer}
        properties[name] = {**outer, "anyOf": [inner, _INTERPOLATION_REF]}


def _copy(schema: dict[str, Any]) -> dict[str, Any]:
    return schema | {"properties": dict(schema["properties"])}
