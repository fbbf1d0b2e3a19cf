"""The user's own Python files, for workers on machines that lack them.

The user's reward functions, flows and losses are in the directory where the run is started. A worker that finds that
directory with the same files works in it; others receive the files that the driver read. Imports only the standard
library, because a worker runs this before it may import torch.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

MAX_BYTES = 8 << 20
MAX_FILES = 2_000
MAX_DIRECTORIES = 10_000
"""Maximum number of directories to search, in case a run was started in a home directory."""
_NOT_CODE = frozenset({"__pycache__", "node_modules", "site-packages"})


@dataclass(slots=True, frozen=True)
class UserCode:
    """Python files of a directory, by path relative to it."""

    directory: str
    files: dict[str, bytes] = field(default_factory=dict)
    problem: str | None = None
    """Why the files were not collected."""


def collect_code(directory: Path) -> UserCode:
    """The Python files below a directory, except in virtual environments and hidden directories.

    A directory with more files than may be sent gives a ``problem``, raised only by workers without that directory.
    """
    files: dict[str, bytes] = {}
    total = 0
    for path in _python_files(directory):
        if path is None:
            return UserCode(str(directory), problem=_problem(directory, f"more than {MAX_DIRECTORIES} directories"))
        try:
            content = path.read_bytes()
        except OSError:
            continue  # unreadable or removed meanwhile: an import that needs it will name it
        total += len(content)
        files[path.relative_to(directory).as_posix()] = content
        if total > MAX_BYTES or len(files) > MAX_FILES:
            found = f"more than {MAX_FILES} Python files, or {MAX_BYTES >> 20} MiB of them"
            return UserCode(str(directory), problem=_problem(directory, found))
    return UserCode(str(directory), files)


def enter_directory(directory: str, code: UserCode | None) -> str | None:
    """Work in the driver's directory if this machine has it with the same files, otherwise in a copy of its files.

    Args:
        code: None if no files are sent.

    Returns:
        The problem if the directory is missing here and its files were not sent, else None.
    """
    path = Path(directory)
    if code is None or _holds(path, code.files):
        if path.is_dir():
            os.chdir(path)
        return None
    copy = Path(tempfile.mkdtemp(prefix="chatlearn-code-"))
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    for name, content in code.files.items():
        file = copy / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    os.chdir(copy)
    sys.path[:] = [str(copy), *(entry for entry in sys.path if entry != directory)]
    return code.problem


def _holds(directory: Path, files: dict[str, bytes]) -> bool:
    """Whether a directory exists and has these files with this content."""
    try:
        return directory.is_dir() and all((directory / name).read_bytes() == content for name, content in files.items())
    except OSError:
        return False


def _python_files(directory: Path) -> Iterator[Path | None]:
    """In order; None when there are too many directories."""
    for count, (folder, folders, names) in enumerate(os.walk(directory), 1):
        if count > MAX_DIRECTORIES:
            yield None
        folders[:] = sorted(name for name in folders if _holds_code(Path(folder, name)))
        for name in sorted(names):
            if name.endswith(".py"):
                yield Path(folder, name)


def _holds_code(folder: Path) -> bool:
    return not (folder.name.startswith(".") or folder.name in _NOT_CODE or (folder / "pyvenv.cfg").exists())


def _problem(directory: Path, found: str) -> str:
    return (
        f"this machine does not have {directory}, where the run was started, and its Python files cannot be sent: it "
        f"holds {found}. Start the run in a directory of its own, put the directory on a disk that all machines see, "
        "or set runtime.options.working_dir to a directory with the code alone (runtime.options.ship_code: false if "
        "workers need none of it)"
    )
