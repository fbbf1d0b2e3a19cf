"""Imports new or changed plugins in a child process before this process imports them.

A plugin's exception can be caught, but a plugin that ends the process (``os._exit``, a crash in C) or never returns
cannot: if that happens in the child, the plugin is reported and not imported here. Successful imports are remembered by
distribution, version and state of the files, so that a child is rarely needed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import IO, Any

from chatlearn_core import __version__
from chatlearn_core.plugins.markers import PROJECT

LIMIT_VARIABLE = "CHATLEARN_PLUGIN_TIMEOUT_S"
"""Time limit for importing one plugin, seconds; 0 disables the trial."""
DEFAULT_LIMIT_S = 30.0
TRIED_VARIABLE = "CHATLEARN_PLUGINS_TRIED"
"""The sources that this process has tried, passed to its child processes so that they need not try again."""
MOST_REMEMBERED = 1000
_START_S = 10.0
_STACK_S = 2.0
"""Time that the child has after the limit to report where it hangs, seconds."""

Sources = Mapping[str, EntryPoint]
"""State (``state_of``) -> the entry point to import."""


def failures(sources: Sequence[tuple[EntryPoint, str, str]]) -> list[str]:
    """The reason why each entry point must not be imported here; empty if it may be.

    Args:
        sources: entry point, name and version of its distribution.
    """
    limit_s = _limit()
    if limit_s <= 0 or not sys.executable:
        return [""] * len(sources)
    states = [state_of(*source) for source in sources]
    tried = {state for state in os.environ.get(TRIED_VARIABLE, "").split(",") if state}
    known = _remembered() | tried
    new = {state: source[0] for state, source in zip(states, sources, strict=True) if state not in known}
    found = _try(new, limit_s) if new else {}
    passed = [state for state in new if state not in found]
    if passed:
        _remember(passed)
        os.environ[TRIED_VARIABLE] = ",".join(sorted(tried | set(passed)))
    return [found.get(state, "") for state in states]


def state_of(point: EntryPoint, distribution: str, version: str) -> str:
    """Identifies an entry point and the current state of its package's files; any change gives a new value."""
    package = point.value.partition(":")[0].partition(".")[0]
    content = [__version__, sys.version, sys.prefix, distribution, version, point.name, point.value, *_files(package)]
    return hashlib.sha256("\0".join(content).encode(errors="surrogateescape")).hexdigest()[:32]


def _files(package: str) -> list[str]:
    """Number, total size and latest change of a package's Python files, found without importing it."""
    try:
        spec = PathFinder.find_spec(package) or next(
            filter(None, (finder.find_spec(package, None) for finder in sys.meta_path)), None
        )
    except Exception:  # finders are third-party code; the import will show the error
        return ["unknown"]
    if spec is None:
        return ["missing"]
    roots = [Path(root) for root in spec.submodule_search_locations or ()]
    files = [file for root in roots for file in root.rglob("*.py")] or [Path(spec.origin or "")]
    facts = []
    for file in files:
        with contextlib.suppress(OSError):
            facts.append(file.stat())
    newest = max((fact.st_mtime_ns for fact in facts), default=0)
    return [str(spec.origin), str(len(facts)), str(sum(fact.st_size for fact in facts)), str(newest)]


def _try(sources: Sources, limit_s: float) -> dict[str, str]:
    """Import the sources in a child, one after another; if a child is lost, another continues with the next."""
    found: dict[str, str] = {}
    waiting = dict(sources)
    while waiting:
        done, lost = _one_child(waiting, limit_s)
        for state in done:
            del waiting[state]
        if lost is None:
            break
        culprit, reason = lost
        if culprit is None:
            break  # the child itself cannot run here, which says nothing about plugins
        found[culprit] = reason
        del waiting[culprit]
    return found


def _one_child(sources: Sources, limit_s: float) -> tuple[list[str], tuple[str | None, str] | None]:
    """Keys that were imported, and the key and cause with which the child was lost, if it was."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as stacks, os.fdopen(reading, "rb", buffering=0) as reports:
        job = {
            "path": sys.path,
            "sources": [[state, point.name, point.value] for state, point in sources.items()],
            "report": writing,
            "stacks": stacks.fileno(),
            "limit_s": limit_s,
        }
        try:
            child = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from {__name__} import main; main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(writing, stacks.fileno()),
                start_new_session=True,
            )
        except OSError as error:
            os.close(writing)
            return [], (None, str(error))
        os.close(writing)
        try:
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError), child.stdin:
                child.stdin.write(json.dumps(job).encode())
            done, begun, hangs = _follow(reports, limit_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            status = child.wait()
        if begun is None:
            return done, None if len(done) == len(sources) else (None, "the child ended early")
        if hangs:
            return done, (begun, f"its import did not end within {limit_s:g} s ({LIMIT_VARIABLE}){_place(stacks)}")
        return done, (begun, f"its import ended the process{_how(status)}; an exception would have been caught")


def _follow(reports: IO[bytes], limit_s: float) -> tuple[list[str], str | None, bool]:
    """Keys that are done, the key that has begun but is not done, and whether the child exceeded the time limit."""
    done: list[str] = []
    begun: str | None = None
    text = b""
    with selectors.DefaultSelector() as selector:
        selector.register(reports, selectors.EVENT_READ)
        deadline = time.monotonic() + limit_s + _START_S
        while True:
            if not selector.select(max(deadline - time.monotonic(), 0)):
                return done, begun, True
            data = reports.read(4096)
            if not data:
                return done, begun, False
            *lines, text = (text + data).split(b"\n")
            for line in lines:
                word, _, state = line.decode().partition(" ")
                deadline = time.monotonic() + limit_s + _STACK_S
                begun = state if word == "begin" else None
                if word == "end":
                    done.append(state)


def _place(stacks: IO[bytes]) -> str:
    """Where the import hangs: the innermost line of a file outside Python's own library."""
    stacks.seek(0)
    lines = [line.strip() for line in stacks.read().decode(errors="replace").splitlines() if "File " in line]
    own = [line for line in lines if "<frozen" not in line and f"{os.sep}lib{os.sep}python" not in line]
    return f"; it hangs in {(own or lines)[0].removeprefix('File ')}" if lines else ""


def _how(status: int) -> str:
    if status == -signal.SIGKILL:
        return ""  # killed by this process after the child closed its reports
    return f" with exit code {status}" if status >= 0 else f" by signal {-status} ({signal.Signals(-status).name})"


def _limit() -> float:
    try:
        limit_s = float(os.environ.get(LIMIT_VARIABLE, ""))
    except ValueError:
        return DEFAULT_LIMIT_S
    return limit_s if math.isfinite(limit_s) else DEFAULT_LIMIT_S


def _memory() -> Path | None:
    with contextlib.suppress(RuntimeError):  # no home directory
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(base) / PROJECT / "plugins.json"
    return None


def _remembered() -> set[str]:
    file = _memory()
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8")) if file is not None else []
    except (OSError, ValueError, RecursionError):
        return set()
    return {state for state in content if isinstance(state, str)} if isinstance(content, list) else set()


def _remember(states: Sequence[str]) -> None:
    """Save the states. If that fails, the next process tries the plugins again."""
    file = _memory()
    if file is None or not states:
        return
    kept = [state for state in sorted(_remembered()) if state not in states]
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        aside = file.with_name(f"{file.name}.{os.getpid()}")
        aside.write_text(json.dumps([*kept, *states][-MOST_REMEMBERED:]), encoding="utf-8")
        aside.replace(file)


def main() -> None:
    """Entry point of the child: read the sources to import, and report before and after each."""
    from chatlearn_core.plugins.loader import load_source
    from chatlearn_core.plugins.sources import PluginSource

    job = json.loads(sys.stdin.buffer.read())
    sys.path[:] = job["path"]
    for state, name, value in job["sources"]:
        os.write(job["report"], f"begin {state}\n".encode())
        faulthandler.dump_traceback_later(job["limit_s"], file=job["stacks"])
        point = EntryPoint(name, value, PROJECT)
        with contextlib.suppress(KeyboardInterrupt):
            load_source(PluginSource(name, name, "", point.load))
        faulthandler.cancel_dump_traceback_later()
        os.write(job["report"], f"end {state}\n".encode())
    os._exit(0)  # regardless of threads that the plugins left running
