"""Runs code in a new interpreter, to see what an import brings with it and what a command leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
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
HEAVY = ENGINES | {"tokenizers", "torch"}
"""What is imported only for a run that has selected the plugin."""
_IMPORTED = """
import contextlib, importlib, io, json, sys
watched = set(json.loads(sys.argv[1]))
found = {}
for module in sys.argv[2:]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        importlib.import_module(module)
    found[module] = [sorted(watched.intersection(sys.modules)), said.getvalue()]
print(json.dumps(found))
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


def assert_imports_none_of(packages: Collection[str], modules: Sequence[str], limit_s: float) -> None:
    """Import modules one after another in a new interpreter.

    Args:
        packages: names of packages that must not be imported with them.
        modules: names of modules.
        limit_s: time limit, seconds.

    Raises:
        AssertionError: an import fails, exceeds the limit, prints something, or brings one of the packages with it.
    """
    done = run_python(["-P", "-c", _IMPORTED, json.dumps(sorted(packages)), *modules], limit_s)
    assert done.code == 0, f"{' and '.join(modules)} cannot be imported: {done.stderr.strip()[-500:]}"
    for module, (heavy, said) in json.loads(done.stdout.splitlines()[-1]).items():
        assert not said, f"importing {module} prints {said[:200]!r}"
        assert not heavy, f"importing {module} imports {', '.join(heavy)}; import it where it is used"
