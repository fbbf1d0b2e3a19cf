"""The plugins named in a configuration: selected from the registry, with options validated by their own models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from chatlearn_config.fields import model_at, valid_keys
from chatlearn_config.problems import KeyPath, Marks, Problem, meant_key, show_path, unknown_key
from chatlearn_config.validation import problems_of
from chatlearn_core.config.models import SYNC, RunConfig
from chatlearn_core.exceptions import PluginError
from chatlearn_core.plugins.records import Kind, PluginRecord
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.plugins.requirements import installed_where

ROLES = "roles"
"""Key of the validation context of every options model; its value is the set of all configured role names."""
PLUGINS = "plugins"
"""Key of the validation context of every options model; its value is the ``PluginRegistry``, for options that name
plugins themselves."""
RANKS = "ranks"
"""Key of the validation context of a role's options model; its value is the number of ranks of a replica."""


@dataclass(slots=True, frozen=True)
class SelectedPlugin:
    """One choice of a configuration: the plugin's record, and its options as an instance of its own model."""

    record: PluginRecord
    options: BaseModel


@dataclass(slots=True, frozen=True)
class PluginSite:
    """A place in a configuration where a plugin is chosen by name."""

    path: KeyPath
    """Path of the section: ``("roles", "trainer")``, ``("roles", "reward", "parts", 0)``, ``("algorithm",)``."""
    kind: Kind
    name_key: str
    """``backend``, ``name`` or ``format``."""
    name: str
    options: Mapping[str, Any]
    ranks: int | None = None
    """Number of ranks, for a role that has it."""

    @property
    def key(self) -> str:
        """The dotted path: the key of ``LoadedConfig.choices``."""
        return ".".join(str(part) for part in self.path)

    @property
    def name_path(self) -> KeyPath:
        """Path of the key that names the plugin."""
        return (*self.path, self.name_key)


_LEFT_OPEN: tuple[Kind, ...] = ("weight_sync", "dataset")
"""Kinds for which ``auto`` chooses no plugin yet; for other kinds it is an ordinary name."""
_ROLE_KINDS: tuple[Kind, ...] = ("trainer", "generator", "reward", "environment")


def plugin_sites(values: Mapping[str, Any]) -> Iterator[PluginSite]:
    """All places in resolved, not yet validated values that choose a plugin; malformed places are left to validation.

    ``auto`` (weight sync, dataset format) chooses nothing here: it is decided when the run starts.
    """
    roles = values.get("roles")
    yield from _site(("algorithm",), "algorithm", "name", values.get("algorithm"))
    for role, section in roles.items() if isinstance(roles, Mapping) else ():
        if not isinstance(section, Mapping):
            continue
        for kind in _ROLE_KINDS:
            if section.get("kind") == kind:
                yield from _site(("roles", role), kind, "backend", section)
        for index, part in enumerate(_items(section, "parts")):
            yield from _site(("roles", role, "parts", index), "reward", "backend", part)
    yield from _site(("weight_sync",), "weight_sync", "backend", values.get("weight_sync"))
    yield from _site(("runtime",), "runtime", "backend", values.get("runtime", {}), default="local")
    for index, logger in enumerate(_items(values.get("log"), "loggers")):
        yield from _site(("log", "loggers", index), "logger", "name", logger)
    data, rollout, train = (values.get(name) for name in ("data", "rollout", "train"))
    if isinstance(data, Mapping):
        yield from _site(("data", "sampler"), "sampler", "name", data.get("sampler"))
    if isinstance(rollout, Mapping) and rollout.get("mode") != SYNC:
        yield from _site(("rollout",), "rollout_mode", "mode", rollout)
    for index, chosen in enumerate(_items(rollout, "filters")):
        yield from _site(("rollout", "filters", index), "sample_filter", "name", chosen)
    for index, chosen in enumerate(_items(train, "step_policies")):
        yield from _site(("train", "step_policies", index), "step_policy", "name", chosen)
    for index, chosen in enumerate(_items(values, "schedules")):
        yield from _site(("schedules", index), "schedule", "name", chosen)
    for split in ("train", "eval"):
        for index, dataset in enumerate(_items(values.get("data"), split)):
            yield from _site(("data", split, index), "dataset", "format", dataset)


def _items(section: Any, key: str) -> list[Any]:
    items = section.get(key) if isinstance(section, Mapping) else None
    return items if isinstance(items, list) else []


def _site(path: KeyPath, kind: Kind, name_key: str, section: Any, default: str | None = None) -> Iterator[PluginSite]:
    if not isinstance(section, Mapping):
        return
    name = section.get(name_key, section.get(_misspelled(path, section, name_key), default))
    options = section.get("options", {})
    is_left_open = name == "auto" and kind in _LEFT_OPEN
    if isinstance(name, str) and name and not is_left_open and isinstance(options, Mapping):
        ranks = section.get("ranks", 1) if kind in ("trainer", "generator") else None
        yield PluginSite(path, kind, name_key, name, options, ranks if type(ranks) is int else None)


def _misspelled(path: KeyPath, section: Mapping[str, Any], name_key: str) -> str | None:
    """The misspelled key if ``name_key`` is missing, so that a typo does not hide errors in the options."""
    model = model_at(RunConfig, path)
    valid = valid_keys(model) if model else []
    unknown = [key for key in section if isinstance(key, str) and key not in valid]
    return next((key for key in unknown if meant_key(key, valid) == name_key), None)


@dataclass(slots=True)
class Choices:
    """The outcome for every plugin that a configuration names; keys are dotted paths of the choosing sections."""

    selected: dict[str, SelectedPlugin] = field(default_factory=dict)
    """Plugins without errors."""
    records: dict[str, PluginRecord] = field(default_factory=dict)
    """Records of all plugins that were found, even if their options are wrong."""
    models: dict[KeyPath, type[BaseModel]] = field(default_factory=dict)
    """The options model of each plugin that was found, by the path of its section."""
    problems: list[Problem] = field(default_factory=list)


def choose(values: Mapping[str, Any], registry: PluginRegistry, marks: Marks) -> Choices:
    """Select every plugin that resolved values name and validate its options."""
    choices = Choices()
    roles = values.get("roles")
    names = {ROLES: frozenset(roles) if isinstance(roles, Mapping) else frozenset(), PLUGINS: registry}
    for site in plugin_sites(values):
        try:
            record = _select(site, registry, where=f"{marks.locate(site.name_path)}, {show_path(site.name_path)}")
            model = registry.load_options(record)
        except PluginError as error:
            choices.problems.append(Problem(site.name_path, str(error)))
            continue
        choices.records[site.key] = record
        choices.models[site.path] = model
        context = names if site.ranks is None else {**names, RANKS: site.ranks}
        options, found = validate_options(model, site.options, (*site.path, "options"), record, context)
        choices.problems.extend(found)
        if options is not None:
            choices.selected[site.key] = SelectedPlugin(record, options)
    return choices


def _select(site: PluginSite, registry: PluginRegistry, where: str) -> PluginRecord:
    """The selected record; the required engine is looked up in the interpreter that will host it."""
    record = registry.select(site.kind, site.name, where, installed=None)
    return registry.select(site.kind, site.name, where, installed=installed_where(record, site.options))


def validate_options(
    model: type[BaseModel],
    options: Mapping[str, Any],
    path: KeyPath,
    record: PluginRecord,
    context: Mapping[str, Any] | None = None,
) -> tuple[BaseModel | None, list[Problem]]:
    """An instance of a plugin's options model, or the problems found.

    Types are strict (``'3'`` is no number), except for conversions that JSON needs: a list may become a tuple or set,
    text a path or an enumeration. Unknown keys are errors even if the model would ignore them; a model that accepts any
    key sets ``extra="allow"``. Validators find ``context`` in ``ValidationInfo.context``.
    """
    problems: list[Problem] = []
    if model.model_config.get("extra") not in ("allow", "forbid"):
        valid = set(valid_keys(model)) | set(model.model_fields)
        for key in options:
            if key not in valid:
                problems.append(unknown_key((*path, key), options[key], valid_keys(model)))
    try:
        instance = model.model_validate_json(json.dumps(options), strict=True, context=context)
    except ValidationError as error:
        return None, [*problems, *problems_of(error, model, options, path)]
    except Exception as error:  # a plugin's own validator may raise anything; it must not stop the host
        rule = f"the options model of {record.kind} '{record.name}' raised {type(error).__name__}: {error}"
        return None, [*problems, Problem(path, rule, remedy="this is a fault of the plugin: tell its authors")]
    return (None, problems) if problems else (instance, [])
