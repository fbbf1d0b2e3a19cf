"""Sources of plugins: entry points of installed distributions, found in their metadata without importing them."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from chatlearn_core import __version__
from chatlearn_core.plugins.markers import PROJECT as ENTRY_POINT_GROUP

CORE = "chatlearn-core"
COMMAND_LINE = "chatlearn-cli"
"""Its commands keep their names, whatever other distributions register."""
DISABLE_VARIABLE = "CHATLEARN_DISABLE_PLUGINS"


@dataclass(slots=True, frozen=True)
class PluginSource:
    """One entry point of one distribution: a module (or any object) with hook implementations."""

    name: str
    """The entry point's name."""
    distribution: str
    version: str
    load: Callable[[], Any]
    """Imports the module. May raise anything."""
    point: metadata.EntryPoint | None = None
    """The entry point that ``load`` imports, if another process could import it, too."""
    incompatible: str = ""
    """Reason not to import the source: its distribution's metadata require another version of the core."""


def installed_sources() -> Iterator[PluginSource]:
    """Every entry point of the group ``chatlearn``; of two distributions with one name the first on the path counts."""
    seen: set[str] = set()
    for distribution in metadata.distributions():
        try:
            text = distribution.read_text("entry_points.txt")
            if not text or f"[{ENTRY_POINT_GROUP}]" not in text:
                continue
            entry_points = [point for point in distribution.entry_points if point.group == ENTRY_POINT_GROUP]
        except (OSError, TypeError, ValueError) as error:  # unreadable, a line without '=', not UTF-8
            name, version = name_and_version(distribution)
            load = raising(f"its entry_points.txt cannot be read: {type(error).__name__}: {error}")
            yield PluginSource(name, name, version, load)
            continue
        name, version = name_and_version(distribution)  # only now: reading the metadata of everything takes a while
        if canonicalize_name(name) in seen:
            continue
        seen.add(canonicalize_name(name))
        incompatible = core_version_problem(distribution.requires or ())
        for point in sorted(entry_points):
            yield PluginSource(point.name, name, version, point.load, point, incompatible)


def name_and_version(distribution: metadata.Distribution) -> tuple[str, str]:
    """Name and version from the metadata; a partly removed distribution has neither."""
    found = distribution.metadata
    return found["Name"] or "(unnamed distribution)", found["Version"] or "(unknown version)"


def raising(message: str) -> Callable[[], Any]:
    """A ``load`` that fails."""

    def load() -> Any:
        raise ValueError(message)

    return load


def core_version_problem(requires: Sequence[str], core_version: str = __version__) -> str:
    """The reason why a distribution's requirements exclude this version of the core; empty if they do not."""
    for text in requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # left to the installer; only a readable requirement on the core can exclude this one
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        on_core = canonicalize_name(requirement.name) == CORE and applies
        if on_core and not requirement.specifier.contains(core_version, prereleases=True):
            return f"requires {CORE}{requirement.specifier}; installed: {CORE} {core_version}"
    return ""


@dataclass(slots=True, frozen=True)
class DisabledDistributions:
    """The distributions that ``CHATLEARN_DISABLE_PLUGINS`` names, comma-separated; names are normalised."""

    names: tuple[str, ...] = ()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> DisabledDistributions:
        """Read the variable."""
        return cls(tuple(name.strip() for name in environment.get(DISABLE_VARIABLE, "").split(",") if name.strip()))

    def __contains__(self, distribution: str) -> bool:
        return canonicalize_name(distribution) in {canonicalize_name(name) for name in self.names}

    def unknown(self, distributions: set[str]) -> list[str]:
        """A warning for each name that belongs to no plugin distribution."""
        known = sorted(canonicalize_name(name) for name in distributions)
        return [
            f"{DISABLE_VARIABLE} names {name!r}, which no installed plugin distribution is called."
            + did_you_mean(canonicalize_name(name), known)
            for name in self.names
            if canonicalize_name(name) not in known
        ]


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """`` Did you mean 'x'?`` with the nearest name, or an empty string."""
    nearest = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""
