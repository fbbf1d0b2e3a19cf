"""Runs code in a new interpreter, to see what an import brings with it and what a command leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ENGINES = frozenset(
    {
        "accelerate",
        "ctranslate2",
        "datasets",
        "deepspeed",
        "jax",
        "megatron",
        "pyarrow",
        "ray",
        "sglang",
        "tensorflow",
        "transformers",
        "trl",
        "vllm",
    }
)
"""Packages that take seconds to import, start threads or ask for devices."""
_IMPORTED = """
import contextlib, importlib, io, json, sys
said = io.StringIO()
with contextlib.redirect_stdout(said):
    importlib.import_module(sys.argv[1])
print(json.dumps([sorted({name.partition(".")[0] for name in sys.modules}), said.getvalue()]))
"""


@dataclass(slots=True, frozen=True)
class Finished:
    """A process that ended."""

    code: int
    """Exit code; -1 if it was stopped at the limit."""
    stdout: str
    stderr: str


def run_python(
    arguments: Sequence[str], limit_s: float, *, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> Finished:
    """Run this interpreter with arguments, this process's search path and no input.

    Args:
        arguments: after the name of the interpreter.
        limit_s: time limit, seconds.
        cwd: working directory.
        environment: variables in addition to this process's.
    """
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    variables = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **(environment or {})}
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=variables,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finished(-1, "", f"it did not end within {limit_s:g} s")
    return Finished(done.returncode, done.stdout, done.stderr)


def imported_with(module: str, limit_s: float, *, allowed: frozenset[str] = frozenset()) -> frozenset[str]:
    """Return the engines that are imported together with a module.

    Args:
        module: name of a module.
        limit_s: time limit, seconds.
        allowed: engines that do not count.

    Raises:
        AssertionError: the import fails, exceeds the limit or prints something.
    """
    done = run_python(["-c", _IMPORTED, module], limit_s)
    assert done.code == 0, f"{module} cannot be imported: {done.stderr[-500:]}"
    names, said = json.loads(done.stdout.splitlines()[-1])
    assert not said, f"importing {module} prints {said[:200]!r}"
    return ENGINES.intersection(names) - allowed
