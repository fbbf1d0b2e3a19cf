"""A failing logger is reported; the run and the other loggers continue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from chatlearn_core.exceptions import ChatLearnError
from chatlearn_core.executor.loggers import Loggers


class ListLogger:
    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.calls: list[str] = []

    def start(self, config: Mapping[str, Any]) -> None:
        self._call("start")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call(f"log {step}")

    def close(self) -> None:
        self._call("close")

    def _call(self, name: str) -> None:
        if self.broken and name.startswith(self.broken):
            raise OSError("no route")
        self.calls.append(name)


def test_one_that_cannot_log_or_close_is_told_about_and_the_others_go_on() -> None:
    told: list[str] = []
    broken, closing, whole = ListLogger("log"), ListLogger("close"), ListLogger()
    loggers = Loggers([broken, closing, whole], told.append)
    loggers.start({})
    loggers.log(3, {"reward": 1.0})
    loggers.close()
    assert whole.calls == ["start", "log 3", "close"]
    assert told == [
        "logger ListLogger failed at step 3: OSError: no route",
        "closing the logger ListLogger failed: no route",
    ]


def test_one_that_cannot_start_stops_the_run() -> None:
    with pytest.raises(ChatLearnError, match=r"the logger ListLogger \(log\.loggers\) does not start: no route"):
        Loggers([ListLogger("start")], print).start({})
