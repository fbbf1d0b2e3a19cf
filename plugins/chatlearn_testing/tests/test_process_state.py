"""Changed state and things left behind are found and named; what did not change is not."""

from __future__ import annotations

import json
import logging
import multiprocessing.shared_memory
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from chatlearn_testing.process_state import ProcessWatch, StateWatch


@contextmanager
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


CHANGES: dict[str, tuple[Callable[[], object], Callable[[], object], str]] = {
    "python": (lambda: random.seed(1), lambda: None, "random state of Python"),
    "numpy": (lambda: np.random.seed(1), lambda: None, "random state of numpy"),  # the global one
    "torch": (lambda: torch.manual_seed(1), lambda: None, "random state of torch"),
    "variable": (lambda: os.environ.update(ACME="1"), lambda: os.environ.pop("ACME"), "environment: ACME"),
    "path": (lambda: sys.path.append("/none"), lambda: sys.path.remove("/none"), "sys.path"),
    "logging": (lambda: logging.disable(50), lambda: logging.disable(0), "level of logging"),
    "umask": (lambda: os.umask(0o027), lambda: os.umask(0o022), "umask"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_state_is_named(name: str) -> None:
    change, undo, expected = CHANGES[name]
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    mask = os.umask(0o022)
    watch = StateWatch()
    try:
        assert watch.changed_state() == []
        change()
        [found] = watch.changed_state()
        assert expected in found
    finally:
        undo()
        os.umask(mask)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def test_patched_functions_and_handlers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = StateWatch()
    with handler():
        assert watch.changed_state() == ["the signal handlers: SIGUSR1"]
    monkeypatch.setattr(json, "loads", lambda text: text)
    assert watch.changed_state() == ["patched functions: json.loads"]


def test_threads_are_named_until_they_end() -> None:
    watch, ends = StateWatch(wait_s=0.1), threading.Event()
    thread = threading.Thread(target=ends.wait, name="acme")
    thread.start()
    assert watch.threads_left() == ["thread 'acme'"]
    ends.set()
    thread.join()
    assert watch.threads_left() == []


def test_ports_and_open_shared_memory_are_named() -> None:
    watch = ProcessWatch(wait_s=0.1)
    block = multiprocessing.shared_memory.SharedMemory(create=True, size=16)
    with socket.create_server(("127.0.0.1", 0)) as server:
        time.sleep(0)
        found = watch.left_behind()
        assert f"port {server.getsockname()[1]}, listening" in found
        assert f"shared memory {block.name}" in found
    block.close()
    block.unlink()
    assert not [line for line in watch.left_behind() if block.name in line or line.startswith("port")]
