"""What a child process needs to find its packages: their directories, and a clean environment."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from chatlearn_hosting.bootstrap import PACKAGES_VARIABLE

BOOTSTRAP = Path(__file__).with_name("bootstrap.py")
OWN_PACKAGE = "chatlearn_hosting.engine_side"
INTERPRETER_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PYTHONEXECUTABLE", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""Variables that describe this interpreter and would mislead another one."""


def package_directories(package: str) -> dict[str, str]:
    """Return import name -> directory for ``package`` and for the ChatLearn code that it may import."""
    return {name: _directory(name) for name in (OWN_PACKAGE, package)}


def child_environment(python: str, packages: Mapping[str, str], overrides: Mapping[str, str | None]) -> dict[str, str]:
    """Return the environment variables of a child.

    Args:
        python: the child's interpreter.
        packages: result of ``package_directories``.
        overrides: variables to set in addition to this process's own; None unsets one.
    """
    environment = dict(os.environ)
    if Path(python) != Path(sys.executable):
        for variable in INTERPRETER_VARIABLES:
            environment.pop(variable, None)
    environment[PACKAGES_VARIABLE] = json.dumps(packages)
    environment["PYTHONUNBUFFERED"] = "1"
    for variable, value in overrides.items():
        if value is None:
            environment.pop(variable, None)
        else:
            environment[variable] = value
    return environment


def _directory(package: str) -> str:
    spec = importlib.util.find_spec(package)
    assert spec is not None, package
    assert spec.submodule_search_locations, f"{package} is not a package"
    return str(Path(spec.submodule_search_locations[0]).resolve())
