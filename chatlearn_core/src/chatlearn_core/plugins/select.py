"""Selection of a plugin by name and import of its code; errors list the available choices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

from chatlearn_core.exceptions import (
    PluginConflictError,
    PluginError,
    PluginIncompatibleError,
    PluginNotFoundError,
)
from chatlearn_core.plugins.entry import PluginEntry
from chatlearn_core.plugins.import_string import resolve_import_string
from chatlearn_core.plugins.records import GeneratorSpec, Kind, PluginRecord
from chatlearn_core.plugins.requirements import InstalledVersion, installed_here, missing_requirements
from chatlearn_core.plugins.sources import did_you_mean

if TYPE_CHECKING:
    from pydantic import BaseModel

META_DISTRIBUTION = "chatlearn"
"""The distribution that only depends on others; its extras are named after the plugins that they install."""
COMES_WITH: dict[tuple[Kind, str], str] = {
    ("cli_command", "plugins check"): "chatlearn-testing",
    ("cli_command", "plugins new"): "chatlearn-testing",
    ("runtime", "local"): "chatlearn-local",
}
"""Plugins that the core refers to but does not contain, and the distribution that provides each."""
KIND_TITLES: dict[Kind, str] = {
    "trainer": "trainer backend",
    "generator": "generator backend",
    "reward": "reward",
    "weight_sync": "weight sync",
    "algorithm": "algorithm",
    "environment": "environment",
    "tool": "tool",
    "dataset": "dataset format",
    "example_kind": "kind of examples",
    "model_family": "model family",
    "runtime": "runtime",
    "launcher": "launcher",
    "logger": "logger",
    "cli_command": "command",
    "sampler": "sampler",
    "sample_filter": "sample filter",
    "schedule": "schedule",
    "step_policy": "step policy",
    "rollout_mode": "rollout mode",
    "output": "trainer output",
    "flow_method": "flow method",
    "aggregation": "aggregation",
}
"""Names of the kinds of plugins in messages."""


def select_entry(
    entries: Sequence[PluginEntry],
    kind: Kind,
    name: str,
    where: str,
    installed: InstalledVersion | None = installed_here,
) -> PluginEntry:
    """The only usable entry of that kind and name.

    Args:
        where: file and key that name it, for the error.
        installed: looks up engines in the interpreter that will host the backend; None: not checked here.

    Raises:
        PluginNotFoundError: no usable plugin has that name; lists installed plugins, failures, and the nearest name.
        PluginConflictError: several distributions register it.
        PluginIncompatibleError: it is for another plugin API, or a required engine is not installed.
    """
    named = [entry for entry in entries if entry.kind == kind and entry.name == name]
    usable = [entry for entry in named if entry.record is not None]
    title = KIND_TITLES[kind]
    place = f" ({where})" if where else ""
    if len(usable) > 1:
        lines = [f"  {entry.title}" for entry in usable]
        raise PluginConflictError(
            f"The {title} {name!r} is registered {len(usable)} times{place}; none is preferred.\n"
            + "\n".join(lines)
            + "\n  Uninstall one, or name its distribution in CHATLEARN_DISABLE_PLUGINS."
        )
    if usable:
        (entry,) = usable
        missing = missing_requirements(entry.record.requires, installed) if entry.record and installed else []
        if entry.record and missing:
            raise PluginIncompatibleError(
                f"The {title} {entry.title} cannot run here{place}.\n"
                + "\n".join(f"  {line}" for line in missing)
                + f"\n  {_engine_remedy(entry.record)}"
                + choices(entries, kind, name)
            )
        return entry
    incompatible = [entry for entry in named if entry.status == "incompatible"]
    if incompatible:
        raise PluginIncompatibleError(
            f"The {title} {name!r} is not compatible{place}.\n"
            + "\n".join(f"  {entry.title}: {entry.reason}" for entry in incompatible)
            + choices(entries, kind, name)
        )
    raise PluginNotFoundError(
        f"No {title} named {name!r}{place}."
        + choices(entries, kind, name, suggest=True)
        + _where_from(entries, kind, name)
    )


def choices(entries: Sequence[PluginEntry], kind: Kind, name: str, *, suggest: bool = False) -> str:
    """Final lines of a message: available choices, unusable ones with reasons, and the nearest name."""
    by_origin: dict[str, list[str]] = {}
    for entry in entries:
        if entry.kind == kind and entry.status == "ok":
            by_origin.setdefault(entry.origin, []).append(entry.name)
    working = [f"{', '.join(sorted(names))} ({origin})" for origin, names in sorted(by_origin.items())]
    lines = [("installed", "; ".join(working) or "none")]
    labels = {
        "failed": "failed to load",
        "incompatible": "incompatible",
        "conflict": "in conflict",
        "missing-engine": "engine missing",
        "disabled": "disabled",
    }
    for status, label in labels.items():
        lines += [
            (label, f"{entry.title}: {entry.reason}")
            for entry in entries
            if entry.status == status and entry.kind in (kind, None) and not (entry.name == name and not suggest)
        ]
    width = max(len(label) for label, _ in lines) + 1
    text = "".join(f"\n  {label + ':':<{width}} {value}" for label, value in lines)
    if suggest:
        known = sorted({entry.name for entry in entries if entry.kind == kind and entry.status == "ok"})
        hint = did_you_mean(name, known)
        text += f"\n {hint}" if hint else ""
    return text


def _engine_remedy(record: PluginRecord) -> str:
    """How to install the engine that a record requires."""
    commands = [
        "pip install " + " or ".join(f"'{alternative}'" for alternative in alternatives)
        for alternatives in record.requires
    ]
    elsewhere = ", name an interpreter that holds it in options.python" if _runs_elsewhere(record) else ""
    return f"Install it there ({'; '.join(commands)}){elsewhere}, or choose another backend."


def _runs_elsewhere(record: PluginRecord) -> bool:
    return isinstance(record, GeneratorSpec) and record.own_interpreter


def _where_from(entries: Sequence[PluginEntry], kind: Kind, name: str) -> str:
    """A line about a name that no plugin registers for that kind: its other kinds, or the distribution to install."""
    other = sorted({KIND_TITLES[entry.kind] for entry in entries if entry.name == name and entry.kind is not None})
    if other:
        return f"\n  {name!r} is the name of a {' and a '.join(other)}."
    if any(entry.name == name for entry in entries):
        return ""  # broken or disabled: the error already lists it
    distribution = COMES_WITH.get((kind, name))
    if distribution is not None and all(entry.distribution != distribution for entry in entries):
        return f"\n  It comes with: pip install {distribution}"
    try:
        extras = metadata.metadata(META_DISTRIBUTION).get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        extras = []
    return f"\n  It comes with: pip install '{META_DISTRIBUTION}[{name}]'" if name in extras else ""


def load_attribute(record: PluginRecord, attribute: str, origin: str) -> Any:
    """Import the object named by the field ``attribute`` of a record; ``origin`` is its distribution and version.

    Raises:
        PluginError: the import fails; names plugin, version, import string and cause.
    """
    import_string = getattr(record, attribute)
    try:
        return resolve_import_string(import_string)
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"The {KIND_TITLES[record.kind]} {record.name!r} ({origin}) cannot be imported.\n"
            f"  {attribute} = {import_string!r}: {type(error).__name__}: {error}\n"
            f"  Repair or reinstall {origin.split(' ')[0]}, or choose another {KIND_TITLES[record.kind]}."
        ) from error


def load_callable(record: PluginRecord, attribute: str, origin: str) -> Callable[..., Any]:
    """Import a callable: a factory, a sender, a command.

    Raises:
        PluginError: the import fails or yields something that is not callable; names plugin, version and cause.
    """
    loaded = load_attribute(record, attribute, origin)
    if not callable(loaded):
        raise PluginError(
            f"The {KIND_TITLES[record.kind]} {record.name!r} ({origin}) is not usable.\n"
            f"  {attribute} = {getattr(record, attribute)!r} is a {type(loaded).__name__}; it must be callable."
        )
    target: Callable[..., Any] = loaded
    return target


def load_factory(record: PluginRecord, attribute: str, origin: str) -> Callable[..., Any]:
    """Like ``load_callable``; if the imported code later calls ``sys.exit``, that is a failure of the plugin.

    Raises:
        PluginError: as for ``load_callable``.
    """
    target = load_callable(record, attribute, origin)

    @functools.wraps(target, updated=())
    def build(*args: Any, **kwargs: Any) -> Any:
        try:
            return target(*args, **kwargs)
        except SystemExit as error:
            raise PluginError(
                f"The {KIND_TITLES[record.kind]} {record.name!r} ({origin}) tried to end the process.\n"
                f"  {attribute} = {getattr(record, attribute)!r} raised SystemExit({error.code!r})\n"
                f"  Repair {origin.split(' ')[0]}, or choose another {KIND_TITLES[record.kind]}."
            ) from error

    return build


def load_model(record: PluginRecord, origin: str, attribute: str = "options") -> type[BaseModel]:
    """Import the pydantic model of a record's options, or of a flow method's arguments.

    Raises:
        PluginError: the import fails or yields no pydantic model; names plugin, version and cause.
    """
    loaded = load_attribute(record, attribute, origin)
    from pydantic import BaseModel  # not before a plugin is selected: listing plugins imports no pydantic

    if not (isinstance(loaded, type) and issubclass(loaded, BaseModel)):
        raise PluginError(
            f"The {KIND_TITLES[record.kind]} {record.name!r} ({origin}) is not usable.\n"
            f"  {attribute} names {loaded!r}; it must be a pydantic model."
        )
    return loaded
