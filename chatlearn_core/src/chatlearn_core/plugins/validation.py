"""Validation of records that registering hooks return: pure checks that import nothing."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import get_args

from chatlearn_core.plugins.import_string import import_string_problem
from chatlearn_core.plugins.records import (
    PLUGIN_API_VERSION,
    RECORD_TYPES,
    Channel,
    Export,
    FlowMethodSpec,
    Granularity,
    Kind,
    Payload,
    PluginRecord,
    Reach,
)
from chatlearn_core.plugins.requirements import requirement_syntax_problem

REGISTERING_HOOKS: Mapping[str, Kind] = {
    "chatlearn_cli_commands": "cli_command",
    "chatlearn_runtimes": "runtime",
    "chatlearn_launchers": "launcher",
    "chatlearn_model_families": "model_family",
    "chatlearn_datasets": "dataset",
    "chatlearn_example_kinds": "example_kind",
    "chatlearn_algorithms": "algorithm",
    "chatlearn_environments": "environment",
    "chatlearn_tools": "tool",
    "chatlearn_trainers": "trainer",
    "chatlearn_generators": "generator",
    "chatlearn_rewards": "reward",
    "chatlearn_weight_syncs": "weight_sync",
    "chatlearn_loggers": "logger",
    "chatlearn_outputs": "output",
    "chatlearn_flow_methods": "flow_method",
    "chatlearn_aggregations": "aggregation",
    "chatlearn_samplers": "sampler",
    "chatlearn_sample_filters": "sample_filter",
    "chatlearn_schedules": "schedule",
    "chatlearn_step_policies": "step_policy",
    "chatlearn_rollout_modes": "rollout_mode",
}
"""Hook -> kind of the records that it returns."""

NAME = re.compile(r"[a-z0-9]+([._-][a-z0-9]+)*")
RESERVED_NAMES = frozenset({"auto"})
"""Configurations use it for 'the one that fits'."""
COMMAND_GROUPS = ("plugins",)
"""Commands of the core that accept commands of plugins below them."""

VOCABULARIES: Mapping[str, Collection[str]] = {
    "exports": get_args(Export),
    "channels": get_args(Channel),
    "payloads": get_args(Payload),
    "reach": get_args(Reach),
    "heads": ("lm", "value", "reward"),
    "bases": ("raw", "processed"),
    "unit": ("sample", "group"),
    "per": ("token", "sequence"),
    "loss_unit": ("sequence", "group"),
    "granularity": get_args(Granularity),
    "takes": ("examples", "samples"),
}
"""Fields that the core interprets, and the values it knows."""


def wrong_type_problem(value: object, hook: str) -> str | None:
    """The reason why ``value`` is not of the record type that ``hook`` returns, or None."""
    expected = RECORD_TYPES[REGISTERING_HOOKS[hook]]
    if isinstance(value, expected):
        return None
    problem = f"{hook} returned {short(value)}; it must return {expected.__name__} records"
    if isinstance(value, PluginRecord):
        right_hook = next((name for name, kind in REGISTERING_HOOKS.items() if kind == value.kind), None)
        if right_hook is not None:
            problem += f" ({type(value).__name__} belongs in {right_hook})"
    return problem


def api_version_problem(record: PluginRecord) -> str | None:
    """The reason why a record's plugin API is not this core's, or None."""
    if record.api_version == PLUGIN_API_VERSION:
        return None
    outdated = "ChatLearn" if newer(record.api_version) else "the plugin"
    return (
        f"written for plugin API {record.api_version!r}, this ChatLearn has plugin API {PLUGIN_API_VERSION}; "
        f"update {outdated}"
    )


def newer(api_version: object) -> bool:
    """Whether a record was written for a newer core."""
    return isinstance(api_version, int) and api_version > PLUGIN_API_VERSION


def record_problems(record: PluginRecord) -> list[str]:
    """All rules that a record of the right type and API version breaks."""
    named = command_name_problem if record.kind == "cli_command" else name_problem
    problems = [named(record.name), requirement_syntax_problem(record.requires)]
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.type == "ImportString" or (field.type == "ImportString | None" and value is not None):
            problem = import_string_problem(value)
            problems.append(f"{field.name}: {problem}" if problem else None)
        elif field.name == "layouts":
            problems += [
                f"layouts[{name!r}]: {bad}" for name, text in value.items() if (bad := import_string_problem(text))
            ]
        elif str(field.type).startswith("frozenset[") and field.name != "model_families":
            problems.append(collection_problem(field.name, value))
        elif str(field.type) in ("tuple[Channel, ...]", "tuple[Export, ...]"):
            problems.append(preference_problem(field.name, value))
        elif field.type == "tuple[str, ...]" and isinstance(value, str):
            problems.append(f"{field.name}={short(value)}: must be a tuple of strings; mind the comma: ({value!r},)")
        elif field.name == "order" and type(value) is not int:
            problems.append(f"{field.name}={short(value)}: must be a whole number")
        elif field.name in VOCABULARIES and value not in VOCABULARIES[field.name]:
            problems.append(f"{field.name}={value!r}: must be one of {', '.join(VOCABULARIES[field.name])}")
    if isinstance(record, FlowMethodSpec):
        problems.append(method_name_problem(record.name))
    return [problem for problem in problems if problem]


def method_name_problem(name: object) -> str | None:
    """The reason why a flow method's record is not named ``kind.method``, or None."""
    kind, _, method = str(name).partition(".")
    if kind.isidentifier() and method.isidentifier():
        return None
    return f"name {name!r}: a method of flows is named by the kind of role and the method, such as 'trainer.logprobs'"


def name_problem(name: object) -> str | None:
    """The reason why a name cannot be used in a configuration, or None."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        return f"name {name!r}: a name is lower-case letters and digits, separated by single '_', '-' or '.'"
    if name in RESERVED_NAMES:
        return f"name {name!r} is reserved: configurations use it for 'the one that fits'"
    return None


def command_name_problem(name: object) -> str | None:
    """The reason why a name cannot follow ``chatlearn``, or None: ``report``, or ``plugins check`` in a group."""
    group, space, command = name.partition(" ") if isinstance(name, str) else ("", "", "")
    if not space:
        return name_problem(name)
    if group not in COMMAND_GROUPS:
        return f"name {name!r}: only these commands take others below them: {', '.join(COMMAND_GROUPS)}"
    return name_problem(command)


def collection_problem(field: str, value: object) -> str | None:
    """The reason why a field is not a set of known words, or None."""
    if not isinstance(value, frozenset | set) or not all(isinstance(item, str) for item in value):
        return f"{field}={short(value)}: must be a frozenset of strings"
    vocabulary = VOCABULARIES.get(field)
    unknown = sorted(value.difference(vocabulary)) if vocabulary else []
    if vocabulary and unknown:
        return f"{field} holds {', '.join(map(repr, unknown))}: known are {', '.join(vocabulary)}"
    return None


def preference_problem(field: str, value: object) -> str | None:
    """The reason why a field is not a ranking of known words, or None."""
    if not isinstance(value, tuple) or not value:
        return f"{field}={short(value)}: must be a tuple with at least one of {', '.join(VOCABULARIES[field])}"
    if len(set(value)) < len(value):
        return f"{field}={short(value)}: holds a value twice"
    return collection_problem(field, frozenset(value))


def short(value: object) -> str:
    """A value for a message: its type, and its text if that is short and safe to make."""
    try:
        text = repr(value)
    except Exception as error:  # a plugin's own __repr__ may do anything
        text = f"(its repr raised {type(error).__name__})"
    return f"a {type(value).__name__}: {text if len(text) <= 80 else text[:77] + '...'}"
