"""The first file that runs in a hosted process. It uses only the standard library, and is run by its path.

The interpreter may have nothing of ChatLearn installed. This file loads the hosted packages from their directories
under their usual names, with empty stand-ins for their missing parent packages. Processes that the engine spawns import
this file as ``__mp_main__`` and find the same packages. A package may define ``in_spawned_process()`` to run code there
before the engine's own code.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import types
from pathlib import Path

PACKAGES_VARIABLE = "CHATLEARN_HOSTED_PACKAGES"
"""Environment variable with JSON: package name -> directory."""


def load_package(name: str, directory: str) -> types.ModuleType:
    """Import a package from its directory, under its full name, without changing ``sys.path``."""
    if name in sys.modules:
        return sys.modules[name]
    parents = name.split(".")[:-1]
    for depth in range(1, len(parents) + 1):
        parent = ".".join(parents[:depth])
        if parent not in sys.modules:
            stand_in = types.ModuleType(parent, "Stand-in for a package that this interpreter lacks.")
            stand_in.__path__ = []
            sys.modules[parent] = stand_in
    location = Path(directory) / "__init__.py"
    spec = importlib.util.spec_from_file_location(name, location, submodule_search_locations=[directory])
    if spec is None or spec.loader is None:
        raise ImportError(f"{location} is not a Python package")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if PACKAGES_VARIABLE in os.environ:
    for package, where in json.loads(os.environ[PACKAGES_VARIABLE]).items():
        loaded = load_package(package, where)
        if __name__ == "__mp_main__" and hasattr(loaded, "in_spawned_process"):
            loaded.in_spawned_process()

if __name__ == "__main__":
    # Python put this file's folder first, where its module names would hide others.
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [entry for entry in sys.path if entry != here]
    from chatlearn_hosting.engine_side.server import main

    main(connection=int(sys.argv[1]), stack_file=int(sys.argv[2]))
