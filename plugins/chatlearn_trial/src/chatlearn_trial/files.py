"""The state of files that an import depends on, found without importing anything."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

INSTALLATION_FOLDERS = ("site-packages", "dist-packages")


def files_of(package: str) -> list[str]:
    """Origin, number, total size and latest change of a package's files, other than byte code."""
    try:
        spec = PathFinder.find_spec(package) or next(
            filter(None, (finder.find_spec(package, None) for finder in sys.meta_path)), None
        )
    except Exception:  # finders are third-party code; the import will show the error
        return ["unknown"]
    if spec is None:
        return ["missing"]
    files = [file for folder in spec.submodule_search_locations or () for file in files_in(folder)]
    return [str(spec.origin), *summary([spec.origin or "", *files])]


def files_in(folder: str) -> list[str]:
    """Every file in a folder and below, other than byte code."""
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        found += [f"{place}{os.sep}{name}" for name in names]
    return found


def summary(files: Iterable[str]) -> list[str]:
    """Number, total size and latest change of files."""
    facts = file_facts(files).values()
    newest = max((changed for changed, _ in facts), default=0)
    return [str(len(facts)), str(sum(size for _, size in facts)), str(newest)]


def file_facts(files: Iterable[str]) -> dict[str, tuple[int, int]]:
    """The files that exist, with the time of the last change, ns, and the size."""
    facts = {}
    for file in files:
        with contextlib.suppress(OSError, ValueError):
            status = Path(file).stat()
            facts[file] = (status.st_mtime_ns, status.st_size)
    return facts


def module_facts(modules: Mapping[str, ModuleType | None]) -> dict[str, tuple[int, int]]:
    """The facts of the source files of modules outside the standard library."""
    others = (
        module for name, module in modules.items() if name.partition(".")[0] not in sys.stdlib_module_names and module
    )
    return file_facts(file for module in others if isinstance(file := getattr(module, "__file__", None), str))


def installation_state() -> list[str]:
    """Changes whenever an installer adds or removes a distribution in one of this interpreter's folders."""
    folders = [path for path in sys.path if Path(path).name in INSTALLATION_FOLDERS]
    return [f"{folder}={changed}" for folder, (changed, _) in file_facts(folders).items()]
