"""The global state of a process that code of others should leave alone, before and after it ran."""

from __future__ import annotations

import asyncio
import builtins
import json
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

WATCHED = (builtins, json, os, sys, asyncio, time, random, logging, threading)
"""Modules whose public functions, classes and methods must stay the same objects."""


@dataclass(slots=True, frozen=True)
class ProcessState:
    """What ``differences`` compares."""

    functions: Mapping[str, Any]
    """Name -> function, class or method of a watched module."""
    values: Mapping[str, Any]
    """Description -> copy of a value."""
    environment: Mapping[str, str]

    @classmethod
    def now(cls) -> ProcessState:
        """The state of this process."""
        return cls(dict(functions_of(WATCHED)), dict(_values()), dict(os.environ))

    def differences(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Functions that were replaced, added or removed since, which are put back, and other state that changed."""
        after, missing = dict(functions_of(WATCHED)), object()
        names = [*self.functions, *(name for name in after if name not in self.functions)]
        patched = [name for name in names if self.functions.get(name, missing) is not after.get(name, missing)]
        for name in patched:
            self._put_back(name)
        values = dict(_values())
        changed = [name for name, value in self.values.items() if values[name] != value]
        variables = sorted(
            name
            for name in self.environment.keys() | os.environ.keys()
            if self.environment.get(name) != os.environ.get(name)
        )
        if variables:
            changed.append(f"the environment ({', '.join(variables)})")
        return tuple(patched), tuple(changed)

    def _put_back(self, name: str) -> None:
        """Undo a patch, so that this process can still tell of it."""
        module, *path, attribute = name.split(".")
        owner = reduce(getattr, path, sys.modules[module])
        if name in self.functions:
            setattr(owner, attribute, self.functions[name])
        else:
            delattr(owner, attribute)


def functions_of(modules: Iterable[ModuleType]) -> Iterator[tuple[str, Any]]:
    """Name and object of the public functions and classes of modules, and of the methods of their own classes."""
    for module in modules:
        for name, value in list(vars(module).items()):
            if name.startswith("_") or not callable(value):
                continue
            yield f"{module.__name__}.{name}", value
            if isinstance(value, type) and value.__module__.partition(".")[0] == module.__name__:
                for method, implementation in list(vars(value).items()):
                    if callable(implementation) and not isinstance(implementation, type):
                        yield f"{module.__name__}.{name}.{method}", implementation


def _values() -> Iterator[tuple[str, Any]]:
    yield "sys.meta_path", [id(finder) for finder in sys.meta_path]
    yield "sys.path_hooks", [id(hook) for hook in sys.path_hooks]
    yield "sys.path", list(sys.path)
    yield "the state of the random generator", random.getstate()
    yield "the working directory", _directory()
    yield "the handlers of signals", {number: _handler(number) for number in signal.valid_signals()}
    root = logging.getLogger()
    yield "the level or handlers of the root logger", (root.level, [id(handler) for handler in root.handlers])
    yield "the running threads", {thread.ident for thread in threading.enumerate()}


def _directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it was removed
        return ""


def _handler(number: int) -> object:
    try:
        return signal.getsignal(number)
    except ValueError:  # a number that this system reserves
        return None
