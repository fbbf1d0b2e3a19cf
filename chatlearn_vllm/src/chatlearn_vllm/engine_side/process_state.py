"""Restores the process state that vLLM changes when it starts, because other roles may share the process."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import random
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_LOADED_LIBRARIES = ("LD_PRELOAD", "LD_LIBRARY_PATH")
_BINDING = "VLLM_CPU_OMP_THREADS_BIND"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameter numbers of glibc's ``mallopt``."""
_USER_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
_KEPT_BYTES = 256 << 20
"""About the size of the largest tensor of a model that is served from host memory."""
_MAX_MESSAGES = 40
_MAX_CHARACTERS = 300
"""Longest part of a message to keep: vLLM logs its whole configuration in one message."""


@contextmanager
def preserved() -> Iterator[None]:
    """Restore random states, ``torch.set_num_threads`` and the libraries that child processes load on exit.

    vLLM seeds Python, numpy and torch when it starts. On a CPU it replaces ``torch.set_num_threads`` with a function
    that ignores its argument, and has its workers, which start meanwhile, load libraries of its own.
    """
    libraries = {name: os.environ.get(name) for name in _LOADED_LIBRARIES}
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    set_num_threads = torch.set_num_threads
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        torch.set_num_threads = set_num_threads
        for name, value in libraries.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def imports_quietly() -> Iterator[None]:
    """Silence the warnings that vLLM's imports raise: a user can do nothing about them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def threads_bound(num_workers: int) -> Iterator[None]:
    """Bind the workers of an engine that starts inside the context to cores, by ``bind_threads`` or by the user's
    setting.
    """
    given = os.environ.get(_BINDING)
    os.environ[_BINDING] = bind_threads(num_workers) if given is None else given
    try:
        yield
    finally:
        if given is None:
            del os.environ[_BINDING]


def bind_threads(num_workers: int) -> str:
    """Return the value of ``VLLM_CPU_OMP_THREADS_BIND`` for this machine.

    A single worker shares the caller's threads and is not bound. Several workers get equal parts of the cores this
    process may use; vLLM's own ``auto`` needs one NUMA node for each worker.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // num_workers
    if num_workers == 1 or share == 0:
        return "nobind"
    parts = [cores[rank * share : (rank + 1) * share] for rank in range(num_workers)]
    return "|".join(",".join(map(str, part)) for part in parts)


def allow_amx() -> None:
    """Request the AMX registers for this process from the kernel, where the CPU has them.

    vLLM 0.32 uses them for bfloat16 attention without requesting them, and dies of an illegal instruction unless other
    code in the process has requested them.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def keep_freed_memory() -> bool:
    """Let glibc keep up to 256 MiB of freed memory instead of returning the pages of large tensors at once.

    A reload on a CPU rebuilds, packs and frees every layer. With fresh pages for each layer, page faults take a tenth
    of the reload time or more.

    Returns:
        False if the C library is not glibc, or if the environment already configures what it keeps.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _USER_VARIABLES):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(what, _KEPT_BYTES) == 1 for what in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD))


def return_freed_memory() -> None:
    """Give the memory that was freed so far back to the system, where the C library is glibc.

    Without this, parts of an offloaded engine would stay with the process, because of ``keep_freed_memory`` above all.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def set_environment(variables: dict[str, str], defaults: dict[str, str]) -> None:
    """Set ``variables``, and those of ``defaults`` that the user has not set."""
    os.environ.update(variables)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


class EngineLogHandler(logging.Handler):
    """Keep vLLM's last log messages for error texts, and forward the important ones.

    vLLM writes errors and much else to standard error. This handler replaces that output: messages at ``pass_level`` or
    above go to the root logger's handlers, or to standard error if there are none. The engines of one process share one
    handler.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.pass_level = logging.ERROR
        self._kept: deque[str] = deque(maxlen=_MAX_MESSAGES)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message; forward it if its level is high enough."""
        self._kept.append(f"{record.levelname.lower()}: {record.getMessage()}"[:_MAX_CHARACTERS])
        if record.levelno >= self.pass_level:
            root = logging.getLogger()
            (root if root.handlers else _FALLBACK_HANDLER).handle(record)

    def last(self, count: int = 8) -> str:
        """Return the last ``count`` messages, one a line."""
        return "\n".join(list(self._kept)[-count:])


def _fallback_handler() -> Any:
    return logging.lastResort if logging.lastResort is not None else logging.NullHandler()


_FALLBACK_HANDLER = _fallback_handler()


def engine_log(level: str) -> EngineLogHandler:
    """Take over vLLM's logger, once per process, and set the level from which messages are forwarded."""
    logger = logging.getLogger("vllm")
    log = next((handler for handler in logger.handlers if isinstance(handler, EngineLogHandler)), None)
    if log is None:
        log = EngineLogHandler()
        logger.handlers[:] = [log]
        logger.setLevel(logging.INFO)
        logger.propagate = False
    log.pass_level = logging.getLevelNamesMapping()[level.upper()]
    return log
