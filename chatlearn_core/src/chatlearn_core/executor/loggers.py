"""The loggers of a run. A failing logger causes a warning: the run's own files are complete, and the run continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from chatlearn_core.exceptions import ChatLearnError
from chatlearn_core.executor.assembly import Assembly
from chatlearn_core.protocols import Logger


class Loggers:
    """All loggers named in the configuration. Each gets copies of its own, so that it cannot change the run.

    Args:
        loggers: in configuration order.
        warn: called with a description of a logger's failure.
    """

    def __init__(self, loggers: list[Logger], warn: Callable[[str], None]) -> None:
        self.loggers = loggers
        self.warn = warn

    def start(self, settings: Mapping[str, Any]) -> None:
        """Start all loggers; one that cannot start, such as one without credentials, stops the run early.

        Raises:
            ChatLearnError: the error of a logger, its storage or its network.
        """
        for logger in self.loggers:
            try:
                logger.start(deepcopy(dict(settings)))
            except OSError as error:
                raise ChatLearnError(
                    f"the logger {type(logger).__name__} (log.loggers) does not start: {error}. Remove the cause, or "
                    "leave it out of log.loggers"
                ) from error

    def log(self, step: int, line: Mapping[str, float]) -> None:
        """Pass a step on."""
        for logger in self.loggers:
            try:
                logger.log(step, dict(line))
            except Exception as error:
                self.warn(f"logger {type(logger).__name__} failed at step {step}: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Close all."""
        for logger in self.loggers:
            try:
                logger.close()
            except Exception as error:
                self.warn(f"closing the logger {type(logger).__name__} failed: {error}")


def build_loggers(assembly: Assembly, run_dir: Path, warn: Callable[[str], None]) -> Loggers:
    """The loggers named in the configuration."""
    loggers: list[Logger] = []
    for index in range(len(assembly.config.log.loggers)):
        choice = assembly.loaded.chosen("log", "loggers", index)
        assert choice is not None
        loggers.append(assembly.registry.load_factory(choice.record)(choice.options, run_dir))
    return Loggers(loggers, warn)
