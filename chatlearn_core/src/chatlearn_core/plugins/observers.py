"""Notifies observers of events in a run, without letting them stop or change it."""

from __future__ import annotations

import logging
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from chatlearn_core.exceptions import ChatLearnError, PluginError

if TYPE_CHECKING:
    from pathlib import Path

    from chatlearn_core.flow import Graph
    from chatlearn_core.plugins.hookspec import RunStatus
    from chatlearn_core.protocols import DataStore
    from chatlearn_core.types import RunFailure, Sample, SyncReceipt

logger = logging.getLogger(__name__)

Copy = Callable[[], object]
"""Makes a fresh copy of an argument."""


@contextmanager
def _random_numbers_apart() -> Iterator[None]:
    """Isolate the process's random generators: numbers drawn or seeds set in the block do not affect code outside it,
    such as dropout. Libraries that are not loaded are left alone.
    """
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    before = (
        random.getstate(),
        numpy.random.get_state() if numpy is not None else None,
        torch.get_rng_state() if torch is not None else None,
    )
    try:
        yield
    finally:
        random.setstate(before[0])
        if numpy is not None:
            numpy.random.set_state(before[1])
        if torch is not None:
            torch.set_rng_state(before[2])


@dataclass(slots=True, frozen=True)
class Observer:
    """One implementation of an observing hook."""

    hook: str
    origin: str
    """Distribution and version."""
    function: Callable[..., object]
    arguments: tuple[str, ...]
    """Names of the hook's arguments that it takes."""


@dataclass(slots=True)
class Observers:
    """Calls every observing hook; an observer that raises is logged and counted, and the run continues.

    Every observer gets copies of its own, so that its changes reach neither the run nor other observers. Under
    ``strict`` the first failure raises PluginError instead, except in ``chatlearn_error``, where it would hide the
    error being reported.
    """

    observers: Sequence[Observer] = ()
    strict: bool = False
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(distribution and version, hook) -> number of calls that raised."""

    def run_start(self, config: Mapping[str, Any], run_dir: Path, graph: Graph) -> None:
        copies: dict[str, Copy] = {"config": lambda: deepcopy(dict(config)), "graph": lambda: deepcopy(graph)}
        self._notify("chatlearn_run_start", copies, run_dir=run_dir)

    def rollout_end(self, step: int, samples: Sequence[Sample], metrics: Mapping[str, float], store: DataStore) -> None:
        from chatlearn_core.types.read_only import read_only_samples  # there are samples, so torch is loaded anyway

        copies: dict[str, Copy] = {"samples": lambda: read_only_samples(samples), "metrics": lambda: dict(metrics)}
        self._notify("chatlearn_rollout_end", copies, step=step, store=store)

    def step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        self._notify("chatlearn_step_end", {"metrics": lambda: dict(metrics)}, step=step)

    def weights_synced(self, policy_version: int, receipts: Sequence[SyncReceipt]) -> None:
        copies: dict[str, Copy] = {"receipts": lambda: list(receipts)}
        self._notify("chatlearn_weights_synced", copies, policy_version=policy_version)

    def checkpoint_saved(self, step: int, path: Path) -> None:
        self._notify("chatlearn_checkpoint_saved", {}, step=step, path=path)

    def error(self, error: BaseException, failure: RunFailure) -> None:
        self._notify("chatlearn_error", {"failure": lambda: deepcopy(failure)}, error=error)

    def run_end(self, status: RunStatus, summary: Mapping[str, Any]) -> None:
        self._notify("chatlearn_run_end", {"summary": lambda: deepcopy(dict(summary))}, status=status)

    def _notify(self, hook: str, copies: Mapping[str, Copy], **constants: object) -> None:
        """Call the observers of one hook.

        Args:
            hook: name of the hook.
            copies: makes the mutable arguments, anew for each observer that takes them.
            constants: the immutable arguments.
        """
        for observer in self.observers:
            if observer.hook != hook:
                continue
            try:
                arguments = {name: copies[name]() if name in copies else constants[name] for name in observer.arguments}
                with _random_numbers_apart():
                    observer.function(**arguments)
            except (Exception, SystemExit) as error:
                key = (observer.origin, hook)
                self.failures[key] += 1
                if self.strict and hook != "chatlearn_error":
                    raise PluginError(
                        f"{hook} of {observer.origin} raised {type(error).__name__}: {error}\n"
                        "  Observers must not raise under strict mode; fix the plugin, disable it with "
                        "CHATLEARN_DISABLE_PLUGINS, or run without --strict-plugins."
                    ) from error
                logger.warning(
                    "%s of %s raised %s: %s (failure %d; the run continues)",
                    hook,
                    observer.origin,
                    type(error).__name__,
                    error,
                    self.failures[key],
                    exc_info=error if self.failures[key] == 1 and not isinstance(error, ChatLearnError) else None,
                )
