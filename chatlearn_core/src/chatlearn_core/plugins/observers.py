"""Telling observers what happens in a run, so that none of them can stop it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from chatlearn_core.exceptions import PluginError

if TYPE_CHECKING:
    from pathlib import Path

    from chatlearn_core.plugins.hookspec import RunStatus
    from chatlearn_core.types import Sample, SyncReceipt

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Observer:
    """One implementation of an observing hook."""

    hook: str
    origin: str
    """Distribution and version."""
    function: Callable[..., object]
    arguments: tuple[str, ...]
    """Those of the hook's arguments that it takes."""


@dataclass(slots=True)
class Observers:
    """Calls every observing hook; an observer that raises is logged and counted, and the run goes on.

    Under ``strict`` the first failure raises PluginError instead, except in ``chatlearn_error``, where it would hide
    the error being reported.
    """

    observers: Sequence[Observer] = ()
    strict: bool = False
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(distribution and version, hook) -> number of calls that raised."""

    def run_start(self, config: Mapping[str, Any], run_dir: Path) -> None:
        self._notify("chatlearn_run_start", config=config, run_dir=run_dir)

    def rollout_end(self, step: int, samples: Sequence[Sample], metrics: Mapping[str, float]) -> None:
        self._notify("chatlearn_rollout_end", step=step, samples=samples, metrics=metrics)

    def step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        self._notify("chatlearn_step_end", step=step, metrics=metrics)

    def weights_synced(self, policy_version: int, receipts: Sequence[SyncReceipt]) -> None:
        self._notify("chatlearn_weights_synced", policy_version=policy_version, receipts=receipts)

    def checkpoint_saved(self, step: int, path: Path) -> None:
        self._notify("chatlearn_checkpoint_saved", step=step, path=path)

    def error(self, error: BaseException) -> None:
        self._notify("chatlearn_error", error=error)

    def run_end(self, status: RunStatus, summary: Mapping[str, Any]) -> None:
        self._notify("chatlearn_run_end", status=status, summary=summary)

    def _notify(self, hook: str, **arguments: object) -> None:
        for observer in self.observers:
            if observer.hook != hook:
                continue
            try:
                observer.function(**{name: arguments[name] for name in observer.arguments})
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
                    "%s of %s raised %s: %s (failure %d; the run goes on)",
                    hook,
                    observer.origin,
                    type(error).__name__,
                    error,
                    self.failures[key],
                    exc_info=error if self.failures[key] == 1 else None,
                )
