"""What all code of a process shares, and what one part of it may leave behind there. Linux only."""

from __future__ import annotations

import asyncio
import builtins
import gc
import json
import locale
import logging
import math
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import rich.style  # noqa: F401  # draws a random number when it is first imported, whoever does that
import torch

from chatlearn_testing.leftovers import (
    MEMORY_NAMES,
    SHARED_MEMORY,
    outlives_tests,
    shared_memory,
    unheld,
    wait_until_empty,
)
from chatlearn_testing.listeners import tcp_ports
from chatlearn_testing.processes import command, descendants, open_files
from chatlearn_trial.process_state import functions_of

END_S = 5.0
"""Time for threads, processes and ports to end after their owner was closed, seconds."""
RANDOM_STATES = frozenset(f"the random state of {name}" for name in ("Python", "numpy", "torch"))
TORCH_RANDOM_STATE = "the random state of torch"
FUNCTIONS = "patched functions"
ENVIRONMENT = "the environment"
_OTHERS_VARIABLES = frozenset(
    {
        "CHATLEARN_PLUGINS_TRIED",
        "CHATLEARN_TEST_MARK",
        "LD_LIBRARY_PATH",
        "PYTEST_CURRENT_TEST",
        "PYTORCH_NVML_BASED_CUDA_CHECK",
        "TORCHINDUCTOR_CACHE_DIR",
    }
)
"""Set by the discovery of plugins, by a test around this one, by OpenCV as it is imported (tokenizers of Mistral import
it), by pytest, and by torch as it looks for GPUs or loads its compiler."""
_SHARED_MODULES: tuple[ModuleType, ...] = (
    asyncio,
    builtins,
    json,
    logging,
    math,
    os,
    os.path,
    pickle,
    random,
    shutil,
    signal,
    socket,
    subprocess,
    tempfile,
    threading,
    time,
    np.random,
)
"""Modules whose functions no plugin may replace, because all others call them."""
_SIGNALS = tuple(number for number in signal.Signals if number != signal.SIGALRM)
"""pytest-timeout sets another handler of SIGALRM for each test."""
_OWN_THREADS = ("pytest_timeout", "deadline")
"""Begins the names of threads that pytest-timeout, and chatlearn-chat once per process, start."""
_LIBRARIES_THREADS = ("TMonitor",)
"""Classes of threads that libraries start once per process: that of tqdm."""


def process_state() -> dict[str, Any]:
    """Return the state by name; equal values mean that nothing changed."""
    root = logging.getLogger()
    return {
        "the random state of Python": random.getstate(),
        "the random state of numpy": _numpy_state(),
        TORCH_RANDOM_STATE: torch.get_rng_state().numpy().tobytes(),
        "torch's number of threads": torch.get_num_threads(),
        "torch's default dtype": torch.get_default_dtype(),
        "torch's deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch's recording of gradients": (torch.is_grad_enabled(), torch.is_anomaly_enabled()),
        "numpy's handling of errors": np.geterr(),
        "the working directory": os.getcwd(),  # noqa: PTH109  # a path object costs more
        ENVIRONMENT: {name: value for name, value in os.environ.items() if name not in _OTHERS_VARIABLES},
        "the file mode mask (umask)": _umask(),
        "the signal handlers": {number.name: signal.getsignal(number) for number in _SIGNALS},
        "the search path of modules (sys.path)": tuple(sys.path),
        "the recursion limit": sys.getrecursionlimit(),
        "the garbage collector": (gc.isenabled(), gc.get_threshold()),
        "the locale": locale.setlocale(locale.LC_ALL),
        "the default timeout of sockets": socket.getdefaulttimeout(),
        "the level of logging": (root.manager.disable, root.level),
        FUNCTIONS: dict(functions_of(_SHARED_MODULES)),
    }


def changes(before: Mapping[str, Any], after: Mapping[str, Any], ignored: Collection[str] = ()) -> list[str]:
    """Name what differs between two states, with the variables, signals and functions concerned.

    Args:
        before: an earlier ``process_state()``.
        after: a later one.
        ignored: names of state, or of one entry of it: ``"the environment: OMP_NUM_THREADS"``.
    """
    found = []
    for name, value in before.items():
        now = after[name]
        if name in ignored or now is value or (name != FUNCTIONS and now == value):
            continue
        if name == FUNCTIONS:
            patched = sorted(key for key in value.keys() & now.keys() if value[key] is not now[key])
            if patched:
                found.append(f"{name}: {', '.join(patched[:5])}")
        elif isinstance(value, dict):
            keys = sorted(str(key) for key in value.keys() | now.keys() if value.get(key) != now.get(key))
            if keys := [key for key in keys if f"{name}: {key}" not in ignored]:
                found.append(f"{name}: {', '.join(keys[:5])}")
        else:
            found.append(name)
    return found


@contextmanager
def other_random_state(seed: int) -> Iterator[None]:
    """Seed the random generators that all code shares, and restore them afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


@dataclass(slots=True)
class StateWatch:
    """Compares the state and the threads of the process with those when it began; cheap enough for each test."""

    ignored: frozenset[str] = frozenset()
    """What may change; see ``changes``."""
    wait_s: float = END_S
    _state: dict[str, Any] = field(default_factory=process_state)
    _threads: frozenset[threading.Thread] = field(default_factory=lambda: frozenset(threading.enumerate()))

    def changed_state(self) -> list[str]:
        """Name the state that differs."""
        return changes(self._state, process_state(), self.ignored)

    def threads_left(self) -> list[str]:
        """List threads that came since and do not end within ``wait_s``."""
        return wait_until_empty(self._threads_left, self.wait_s)

    def _threads_left(self) -> list[str]:
        return [
            f"thread {thread.name!r}"
            for thread in threading.enumerate()
            if thread not in self._threads
            and not isinstance(thread, threading._DummyThread)  # stands for a thread of foreign code
            and type(thread).__name__ not in _LIBRARIES_THREADS
            and not thread.name.startswith(_OWN_THREADS)
        ]


@dataclass(slots=True)
class ProcessWatch(StateWatch):
    """Compares processes, ports and shared memory, too, which costs about 30 ms."""

    watches_ports: bool = True
    """False for engines whose process groups keep listening until the process ends."""
    _children: frozenset[int] = field(default_factory=lambda: frozenset(descendants(os.getpid())))
    _ports: frozenset[int] = field(default_factory=lambda: frozenset(tcp_ports(os.getpid())))
    _memory: frozenset[str] = field(default_factory=shared_memory)
    _own_memory: frozenset[str] = field(default_factory=lambda: _shared_memory_of_this_process())

    def left_behind(self) -> list[str]:
        """List threads, processes, ports and shared memory that came since and do not end within ``wait_s``."""
        return wait_until_empty(self._left, self.wait_s)

    def _left(self) -> list[str]:
        found = self._threads_left()
        started = {pid: command(pid) for pid in set(descendants(os.getpid())) - self._children}
        found += [f"process {pid}: {line}" for pid, line in started.items() if not outlives_tests(line)]
        if self.watches_ports:
            found += [f"port {port}, listening" for port in tcp_ports(os.getpid()) - self._ports]
        held = _shared_memory_of_this_process() - self._own_memory
        new = {name for name in shared_memory() - self._memory - held if name.startswith(MEMORY_NAMES)}
        lost = unheld(frozenset(new), besides=os.getpid())
        return sorted(found + [f"shared memory {name}" for name in held | lost])


def _shared_memory_of_this_process() -> frozenset[str]:
    prefix = f"{SHARED_MEMORY}/"
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    names = [line.partition(prefix)[2] for line in mapped.splitlines() if prefix in line]
    names += [name.removeprefix(prefix) for name in open_files(os.getpid()) if name.startswith(prefix)]
    # Semaphores of multiprocessing lie there, too; some libraries make one when they are first used.
    return frozenset(name.removesuffix(" (deleted)") for name in names if not name.startswith("sem."))


def _numpy_state() -> tuple[Any, ...]:
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return name, np.asarray(keys).tobytes(), position, has_gauss, gauss


def _umask() -> str:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("Umask:"):
            return line.partition(":")[2].strip()
    return ""
