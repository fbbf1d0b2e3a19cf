"""Starts the engine's processes on a CPU as copies of one that has imported SGLang and done nothing else.

SGLang spawns its schedulers and its detokenizer, each of which imports SGLang anew. Here one process is forked before
the engine is built, and ``multiprocessing``'s fork server in it forks all others. Not for GPUs: SGLang prepares those
processes through the environment in which their interpreter starts.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing import context, forkserver, resource_tracker, util
from pathlib import Path
from types import ModuleType
from typing import Any

ENGINE = "sglang.srt.entrypoints.engine"
PRELOADED = (ENGINE, "sglang.srt.models.registry")
"""Modules that every scheduler imports; the second imports the code of all models."""


class CopiedProcess(context.ForkServerProcess):
    """Gets the environment of the process that starts it, as a spawned one does."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        # Only what differs: setproctitle finds the title's memory by the place of the first variable.
        for name in os.environ.keys() - self._environment.keys():
            del os.environ[name]
        for name, value in self._environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        super().run()


class Multiprocessing:
    """Stands in for the module ``multiprocessing`` in SGLang's ``entrypoints.engine``."""

    Process = CopiedProcess

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def use_copies() -> None:
    """Fork the process that will be copied, and let SGLang start its processes so. Hooks must be registered before,
    and no event loop may run.
    """
    for name in PRELOADED:
        importlib.import_module(name)
    resource_tracker.ensure_running()  # which starts a process in the same way
    start = util.spawnv_passfds
    util.spawnv_passfds = _fork_server
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = start
    engine = sys.modules[ENGINE]
    engine.mp = Multiprocessing(engine.mp)  # type: ignore[attr-defined]


def _fork_server(path: object, args: object, passfds: Sequence[int]) -> int:
    """What ``multiprocessing`` calls to start its fork server; returns the process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        _detach(passfds)
        main: Any = forkserver.main  # typeshed mixes up its first two arguments
        main(*passfds, [])
    except SystemExit:
        pass  # the engine has ended
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _detach(kept: Sequence[int]) -> None:
    """Let go of what belongs to the process that this one was forked from."""
    forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined]  # the thread that forks holds it
    asyncio.set_event_loop(None)
    # A scheduler that fails tells the process that started it, which SGLang takes for the engine's.
    signal.signal(signal.SIGQUIT, lambda *_: os.kill(os.getppid(), signal.SIGQUIT))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for entry in list(Path("/proc/self/fd").iterdir()):
        descriptor = int(entry.name)
        # Not closed: an object that still owns the number would close its next user's file.
        if descriptor > 2 and descriptor not in (nowhere, *kept) and entry.exists():
            os.dup2(nowhere, descriptor, inheritable=False)
