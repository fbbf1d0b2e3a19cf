"""Loads the modules of plugin entry points and records every outcome in a registry.

A plugin cannot stop its host while loading: an exception, ``sys.exit``, a syntax error, a wrong return value, or an
import that hangs or ends the process becomes an entry with a status and a reason. Only strict mode raises.
"""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout as stdout_to_stderr
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import EntryPoint
from typing import Any

import pluggy

from chatlearn_core.exceptions import PluginError
from chatlearn_core.plugins import hookspec
from chatlearn_core.plugins.entry import PluginEntry, Status
from chatlearn_core.plugins.markers import PROJECT
from chatlearn_core.plugins.observers import Observer, Observers
from chatlearn_core.plugins.records import GeneratorSpec, Kind, PluginRecord
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.plugins.requirements import missing_requirements
from chatlearn_core.plugins.sources import (
    COMMAND_LINE,
    CORE,
    DISABLE_VARIABLE,
    DisabledDistributions,
    PluginSource,
    did_you_mean,
    installed_sources,
)
from chatlearn_core.plugins.trial import Loaded, load_apart
from chatlearn_core.plugins.validation import (
    REGISTERING_HOOKS,
    api_version_problem,
    record_problems,
    short,
    wrong_type_problem,
)
from chatlearn_trial import packed

PROJECT_PREFIX = f"{PROJECT}_"


def discover_plugins(*, strict: bool = False, extra: Iterable[PluginSource] = ()) -> PluginRegistry:
    """Load every installed plugin that is not disabled, and ``extra`` plugins that belong to no distribution.

    Raises:
        PluginError: under ``strict``, some plugin is neither ``ok`` nor disabled; names all of them.
    """
    return load_plugins([*installed_sources(), *extra], strict=strict)


def load_plugins(
    sources: Iterable[PluginSource], *, disabled: DisabledDistributions | None = None, strict: bool = False
) -> PluginRegistry:
    """Load plugins from ``sources``; ``disabled`` comes from the environment by default.

    Raises:
        PluginError: as for ``discover_plugins``.
    """
    sources = list(sources)
    disabled = DisabledDistributions.from_environment() if disabled is None else disabled
    tried = try_sources([source for source in sources if source.distribution not in disabled])
    loads = [
        load_source(source, disabled=source.distribution in disabled, tried=tried.get(source)) for source in sources
    ]
    entries = mark_conflicts([entry for load in loads for entry in load.entries])
    registry = PluginRegistry(
        entries=tuple(sorted(entries, key=lambda entry: (entry.kind or "", entry.name, entry.distribution))),
        observers=Observers([observer for load in loads for observer in load.observers], strict=strict),
        warnings=(
            *disabled.unknown({source.distribution for source in sources}),
            *(f"{source.distribution} {source.version}: {one.warning}" for source, one in tried.items() if one.warning),
        ),
    )
    if strict:
        require_all_ok(registry)
    return registry


def try_sources(sources: Iterable[PluginSource]) -> dict[PluginSource, Loaded]:
    """What a child process found out about sources that it could import (see ``trial``)."""
    points = {
        source: (source.point, source.distribution, source.version)
        for source in sources
        if source.point is not None and not source.incompatible and source.distribution != CORE
    }
    return dict(zip(points, load_apart(list(points.values())), strict=True))


@dataclass(slots=True)
class SourceLoad:
    """The entries made from one entry point."""

    source: PluginSource
    entries: list[PluginEntry] = field(default_factory=list)
    observers: list[Observer] = field(default_factory=list)

    @property
    def origin(self) -> str:
        """Distribution and version."""
        return f"{self.source.distribution} {self.source.version}"

    def add(
        self,
        status: Status,
        reason: str = "",
        *,
        name: str | None = None,
        kind: Kind | None = None,
        record: PluginRecord | None = None,
    ) -> None:
        """Record one outcome, by default of the whole entry point."""
        self.entries.append(
            PluginEntry(
                name=self.source.name if name is None else name,
                kind=kind,
                distribution=self.source.distribution,
                version=self.source.version,
                status=status,
                reason=reason,
                record=record,
            )
        )


def load_for_trial(name: str, value: str) -> str:
    """What a child sends of one entry point; empty if this process must import it to learn that."""
    with suppress(KeyboardInterrupt):
        load = imported(name, value)
        records = tuple(entry.record for entry in load.entries if entry.record is not None)
        if len(records) == len(load.entries):
            return packed((records, tuple((observer.hook, observer.arguments) for observer in load.observers)))
    return ""


def load_source(source: PluginSource, *, disabled: bool = False, tried: Loaded | None = None) -> SourceLoad:
    """Import one entry point, call its registering hooks, and check the returned records.

    Args:
        tried: what a child found out: the import is skipped if it must not take place, or adds nothing.
    """
    load = SourceLoad(source)
    if disabled:
        load.add("disabled", f"by {DISABLE_VARIABLE}")
        return load
    if source.incompatible:
        load.add("incompatible", source.incompatible)
        return load
    if tried is not None and tried.failed:
        load.add("failed", tried.failed)
        return load
    if tried is not None and tried.records is not None and source.point is not None:
        for record in tried.records:
            add_record(load, record)
        for position, (hook, arguments) in enumerate(tried.observers):
            later = LaterObserver(source.point.name, source.point.value, position)
            load.observers.append(Observer(hook, load.origin, later, arguments))
        return load
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspec)
    try:
        with stdout_to_stderr(sys.stderr):  # output of a plugin must not mix with `plugins list --json`
            plugin = source.load()
        manager.register(plugin, name=source.name)
        problems = list(unknown_hooks(plugin, manager))
    except (Exception, SystemExit) as error:
        load.add("failed", describe(error))
        return load
    if not problems and not manager.get_hookcallers(plugin):
        problems = ["implements no hook: none of its functions is marked with @hookimpl"]
    for problem in problems:
        load.add("failed", problem)
    for hook in hook_names(manager):
        for implementation in getattr(manager.hook, hook).get_hookimpls():
            if problem_of_hook := implementation_problem(hook, implementation):
                load.add("failed", problem_of_hook)
            elif hook in REGISTERING_HOOKS:
                call_registering_hook(load, hook, implementation)
            else:
                function, arguments = implementation.function, tuple(implementation.argnames)
                load.observers.append(Observer(hook, load.origin, function, arguments))
    return load


@cache
def imported(name: str, value: str) -> SourceLoad:
    """An entry point, imported in this process."""
    return load_source(PluginSource(name, name, "", EntryPoint(name, value, PROJECT).load))


@dataclass(slots=True, frozen=True)
class LaterObserver:
    """An observer that imports its plugin when it is first called. Can be pickled."""

    name: str
    value: str
    """Of the entry point."""
    position: int
    """Among the observers of the plugin."""

    def __call__(self, **arguments: object) -> object:
        load = imported(self.name, self.value)
        if self.position >= len(load.observers):
            raise PluginError("; ".join(entry.reason for entry in load.entries))
        return load.observers[self.position].function(**arguments)


def hook_names(manager: pluggy.PluginManager) -> list[str]:
    """Every specified hook, in the order of ``hookspec.py``."""
    return [name for name in vars(hookspec) if name.startswith(PROJECT_PREFIX) and hasattr(manager.hook, name)]


def unknown_hooks(plugin: Any, manager: pluggy.PluginManager) -> Iterator[str]:
    """Functions that look like hooks but are not: a name without a specification, or a missing ``@hookimpl``.

    pluggy accepts both silently; its ``check_pending`` would stop the host at the first.
    """
    known = hook_names(manager)
    marked = {
        name: implementation.optionalhook
        for name, caller in vars(manager.hook).items()
        if not name.startswith("_")
        for implementation in caller.get_hookimpls()
    }
    for name, optional in marked.items():
        if name not in known and not optional:
            yield f"implements {name}, which is not a hook.{did_you_mean(name, known)}"
    module = plugin.__name__ if inspect.ismodule(plugin) else plugin.__module__
    for name, value in inspect.getmembers_static(plugin):
        own = inspect.isfunction(value) and value.__module__ == module
        if not own or not name.startswith(PROJECT_PREFIX) or name in marked or hasattr(value, f"{PROJECT}_impl"):
            continue
        if name in known:
            yield f"{name} is never called: it is not marked with @hookimpl"
        else:
            yield f"{name} is not a hook, and names with {PROJECT_PREFIX} are for hooks.{did_you_mean(name, known)}"


def implementation_problem(hook: str, implementation: pluggy.HookImpl) -> str | None:
    """The reason why calling an implementation would not have the effect its author expects, or None."""
    if implementation.wrapper or implementation.hookwrapper:
        return f"{hook} is a hook wrapper; hooks of ChatLearn cannot be wrapped"
    if inspect.iscoroutinefunction(implementation.function):
        return f"{hook} is an async function; hooks are called and not awaited"
    if inspect.isgeneratorfunction(implementation.function) and hook not in REGISTERING_HOOKS:
        return f"{hook} is a generator function; its body would never run"
    return None


def call_registering_hook(load: SourceLoad, hook: str, implementation: pluggy.HookImpl) -> None:
    """Add an entry for every record that an implementation returns and for every error."""
    kind = REGISTERING_HOOKS[hook]
    try:
        with stdout_to_stderr(sys.stderr):
            returned: Any = implementation.function()
            is_list = isinstance(returned, Iterable) and not isinstance(returned, str | bytes | dict)
            values = list(returned) if is_list else []
    except (Exception, SystemExit) as error:
        load.add("failed", f"{hook} raised {describe(error)}", kind=kind)
        return
    if not is_list:
        load.add("failed", f"{hook} returned {short(returned)}; it must return a list of records", kind=kind)
    for value in values:
        if problem := wrong_type_problem(value, hook):
            load.add("failed", problem, kind=kind)
        else:
            add_record(load, value)


def add_record(load: SourceLoad, record: PluginRecord) -> None:
    """Add the entry of one record of the right type."""
    name = record.name if isinstance(record.name, str) else None
    if problem := api_version_problem(record):
        load.add("incompatible", problem, name=name, kind=record.kind)
    elif problems := record_problems(record):
        load.add("failed", "; ".join(problems), name=name, kind=record.kind)
    elif missing := missing_requirements(record.requires):
        elsewhere = "; or set options.python to an interpreter that has it" if runs_elsewhere(record) else ""
        load.add("missing-engine", "; ".join(missing) + elsewhere, name=name, kind=record.kind, record=record)
    else:
        load.add("ok", name=name, kind=record.kind, record=record)


def runs_elsewhere(record: PluginRecord | None) -> bool:
    """Whether the record's engine, missing here, may be installed in another interpreter."""
    return isinstance(record, GeneratorSpec) and record.own_interpreter


def mark_conflicts(entries: list[PluginEntry]) -> list[PluginEntry]:
    """Turn all usable entries that share kind and name into conflicts, each naming every provider.

    The command line's own commands keep their names, so that a plugin cannot disable ``chatlearn plugins``.
    """
    same: dict[tuple[Kind | None, str], list[PluginEntry]] = defaultdict(list)
    for entry in entries:
        if entry.record is not None:
            same[entry.kind, entry.name].append(entry)
    marked = []
    for entry in entries:
        rivals = same[entry.kind, entry.name] if entry.record is not None else []
        is_kept = entry.kind == "cli_command" and entry.distribution == COMMAND_LINE
        if len(rivals) > 1 and not is_kept:
            providers = ", ".join(sorted(rival.origin for rival in rivals))
            reason = f"registered by {providers}; uninstall one, or name it in {DISABLE_VARIABLE}"
            entry = replace(entry, status="conflict", reason=reason)
        marked.append(entry)
    return marked


def require_all_ok(registry: PluginRegistry) -> None:
    """Raise PluginError if any plugin is broken, incompatible or in conflict.

    A missing engine is not an error here: it may be an extra or live in another interpreter, and selecting the plugin
    says what is missing.
    """
    bad = [entry for entry in registry.entries if entry.status not in ("ok", "disabled", "missing-engine")]
    lines = [f"{entry.kind or 'plugin'} {entry.title}: {entry.status}: {entry.reason}" for entry in bad]
    lines += registry.warnings
    if lines:
        raise PluginError(
            "Strict mode: every installed plugin must be usable.\n"
            + "".join(f"  {line}\n" for line in lines)
            + f"  Repair or uninstall them, or name their distributions in {DISABLE_VARIABLE}."
        )


def describe(error: BaseException) -> str:
    """Type and message of an error on one line; for a syntax error also its position."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    if isinstance(error, SystemExit):
        return f"SystemExit({error.code!r}): it tried to end the process"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
