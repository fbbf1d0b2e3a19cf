"""What vLLM changes in the process it starts in, put back: other roles may live there too."""

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

_BINDING = "VLLM_CPU_OMP_THREADS_BIND"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of glibc's ``mallopt``."""
_USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
_KEPT_BYTES = 256 << 20
"""As large as the largest tensor of a model that is served from host memory, or nearly."""
_MAX_WORDS = 40
_MAX_CHARACTERS = 300
"""Of one message: vLLM logs its whole configuration in one."""


@contextmanager
def preserved() -> Iterator[None]:
    """Random states and ``torch.set_num_threads`` are afterwards what they were.

    vLLM seeds Python, numpy and torch when it starts, and on a CPU replaces ``torch.set_num_threads`` by a function
    that ignores its argument.
    """
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    set_num_threads = torch.set_num_threads
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        torch.set_num_threads = set_num_threads


@contextmanager
def imports_quietly() -> Iterator[None]:
    """No warnings of what vLLM imports about itself: they ask for nothing that a user could do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def threads_bound(num_workers: int) -> Iterator[None]:
    """Workers of an engine that starts inside are bound to cores as ``bind_threads`` says, or as the user has set."""
    given = os.environ.get(_BINDING)
    os.environ[_BINDING] = bind_threads(num_workers) if given is None else given
    try:
        yield
    finally:
        if given is None:
            del os.environ[_BINDING]


def bind_threads(num_workers: int) -> str:
    """The value of ``VLLM_CPU_OMP_THREADS_BIND`` for this machine.

    One worker shares the caller's threads and is not bound. Several get equal parts of the cores this process may use;
    vLLM's own ``auto`` needs one NUMA node a worker.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // num_workers
    if num_workers == 1 or share == 0:
        return "nobind"
    parts = [cores[rank * share : (rank + 1) * share] for rank in range(num_workers)]
    return "|".join(",".join(map(str, part)) for part in parts)


def allow_amx() -> None:
    """Ask the kernel for this process's AMX registers, where the CPU has them.

    vLLM 0.32 uses them for attention in bfloat16 without asking, and dies of an illegal instruction if nothing else in
    the process has asked before.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def keep_freed_memory() -> bool:
    """Let glibc keep up to 256 MiB of freed memory at hand instead of giving large tensors' pages back at once.

    A reload on a CPU makes every layer anew, packs it, and frees it. With fresh pages for each layer, touching them for
    the first time is a tenth of the reload and more.

    Returns:
        False where the C library is another one, or where the environment already says what is to be kept.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _USERS_OWN):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(what, _KEPT_BYTES) == 1 for what in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD))


def set_environment(variables: dict[str, str], defaults: dict[str, str]) -> None:
    """Set variables, and those of ``defaults`` that the user has not set."""
    os.environ.update(variables)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


class EngineWords(logging.Handler):
    """Keeps the last things vLLM logged, for the message of an error, and passes on what matters.

    vLLM says on standard error what goes wrong and much besides. With this handler it says nothing of its own: what is
    at ``pass_level`` or above goes on to the root logger's handlers, or to standard error where there are none. The
    engines of one process share one handler.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.pass_level = logging.ERROR
        self._kept: deque[str] = deque(maxlen=_MAX_WORDS)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep and pass on."""
        self._kept.append(f"{record.levelname.lower()}: {record.getMessage()}"[:_MAX_CHARACTERS])
        if record.levelno >= self.pass_level:
            root = logging.getLogger()
            (root if root.handlers else _LAST_RESORT).handle(record)

    def last(self, count: int = 8) -> str:
        """The last ``count`` messages, one a line."""
        return "\n".join(list(self._kept)[-count:])


def _last_resort() -> Any:
    return logging.lastResort if logging.lastResort is not None else logging.NullHandler()


_LAST_RESORT = _last_resort()


def engine_words(level: str) -> EngineWords:
    """Take over vLLM's logger, once a process; what is at ``level`` or above is passed on from now on."""
    logger = logging.getLogger("vllm")
    words = next((handler for handler in logger.handlers if isinstance(handler, EngineWords)), None)
    if words is None:
        words = EngineWords()
        logger.handlers[:] = [words]
        logger.setLevel(logging.INFO)
        logger.propagate = False
    words.pass_level = logging.getLevelNamesMapping()[level.upper()]
    return words
