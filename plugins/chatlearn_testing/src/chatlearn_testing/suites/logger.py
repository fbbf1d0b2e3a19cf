"""The contract of a logger: it takes every metric of every step, changes nothing, and leaves nothing running."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import pytest

from chatlearn_core.plugins.records import Kind
from chatlearn_core.protocols import Logger
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.suites.conformance_suite import ConformanceSuite, nothing_is_printed

CONFIG: Mapping[str, Any] = {
    "output_dir": "runs/one",
    "model": {"path": "model", "max_length": None},
    "train": {"steps": 3, "seed": 0, "rates": [1e-4, 0.5], "resume": True},
    "log": {"loggers": [{"backend": "one", "options": {"text": "ä/漢 \n"}}]},
}
STEPS: Mapping[int, Mapping[str, float]] = {
    1: {"reward/mean": 0.25, "loss": -1.5, "perf/tokens_per_s": 12345.678},
    2: {"reward/mean": 0.5, "loss": 1e-30, "samples/excluded/too long": 3.0},
    3: {"reward/mean": 0.75, "loss": 1e30, "eval/gsm8k": 0.0},
}
ODD: Mapping[str, float] = {
    "nan": math.nan,
    "infinite": math.inf,
    "negative infinite": -math.inf,
    "negative zero": -0.0,
    "tiny": 5e-324,
    "integer": 3,
    "large integer": 10**18,
    "name/with/many/parts": 1.0,
    'name with spaces, = and "quotes" {x}': 2.0,
    "näme/漢字/🙂": 3.0,
    "n" * 300: 4.0,
}
ReadBack = Callable[[Path], Iterable[tuple[int, str, float]]]
"""``(run_dir)`` -> (step, name, value) of every number that the logger stored, the last one of a step if it was logged
again."""


class LoggerConformance(ConformanceSuite):
    """Contract tests that every logger must pass.

    A subclass sets ``backend`` and ``options``, and ``read_back`` if the logger stores metrics where a test can read
    them; otherwise values are not tested.
    """

    kind: ClassVar[Kind] = "logger"
    settable: ClassVar[frozenset[str]] = frozenset({"read_back"})
    read_back: ClassVar[ReadBack | None] = None

    def test_is_a_logger(self, tmp_path: Path) -> None:
        """The object has the methods of ``Logger``; the constructor opens nothing, so closing it at once is fine."""
        logger = self._build(tmp_path)
        missing = [name for name in ("start", "log", "close") if not callable(getattr(logger, name, None))]
        assert not missing, f"a method of chatlearn_core.protocols.Logger is missing: {', '.join(missing)}"
        logger.close()
        logger.close()

    def test_every_metric_of_every_step_is_stored(self, tmp_path: Path) -> None:
        """Names, steps and values can be read back, to float32 precision."""
        self._log(tmp_path, STEPS)
        self._assert_stored(tmp_path, STEPS)

    def test_odd_metrics_are_taken(self, tmp_path: Path) -> None:
        """NaN, infinity, integers, long and unusual names raise nothing; the step's other values are kept."""
        logger = self._started(tmp_path)
        logger.log(1, ODD)
        logger.log(2, {})
        logger.log(3, {"reward/mean": 1.0})
        logger.close()
        if type(self).read_back is not None:
            self._assert_stored(tmp_path, {3: {"reward/mean": 1.0}}, exactly=False)

    def test_metrics_and_configuration_are_read_only(self, tmp_path: Path) -> None:
        """``start`` and ``log`` change neither the configuration nor the metrics, which others read, too."""
        config = copy.deepcopy(dict(CONFIG))
        logger = self._build(tmp_path)
        logger.start(config)
        metrics = dict(STEPS[1])
        logger.log(1, metrics)
        logger.log(2, MappingProxyType(dict(STEPS[2])))
        logger.close()
        assert config == CONFIG, "start changed the configuration"
        assert metrics == STEPS[1], "log changed the metrics"

    def test_a_resumed_run_goes_on(self, tmp_path: Path) -> None:
        """A second logger on the same run directory, which repeats a step and goes on, replaces what it repeats."""
        self._log(tmp_path, {1: STEPS[1], 2: {"reward/mean": -9.0, "lost": 1.0}})
        self._log(tmp_path, {2: STEPS[2], 3: STEPS[3]})
        if type(self).read_back is None:
            not_applicable("the suite sets no read_back")
        self._assert_stored(tmp_path, STEPS, exactly=False)

    def test_runs_do_not_mix(self, tmp_path: Path) -> None:
        """Two loggers at a time, of two run directories, store each run's metrics apart."""
        if type(self).read_back is None:
            not_applicable("the suite sets no read_back")
        paths = [tmp_path / name for name in ("one", "other")]
        for path in paths:
            path.mkdir()
        loggers = [self._started(path) for path in paths]
        for step in STEPS:
            for number, logger in enumerate(loggers):
                logger.log(step, {"number": float(number * 10 + step)})
        for logger in loggers:
            logger.close()
        for number, path in enumerate(paths):
            self._assert_stored(path, {step: {"number": float(number * 10 + step)} for step in STEPS})

    def test_closing_twice_is_one_closing(self, tmp_path: Path) -> None:
        """``close`` may be called again, and after a failure between ``start`` and the first step."""
        logger = self._started(tmp_path)
        logger.close()
        logger.close()
        logger = self._started(tmp_path)
        logger.log(1, STEPS[1])
        logger.close()
        logger.close()

    def test_nothing_is_left(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        """After ``close``: no process and no thread of the logger, and no file outside the run's directory. Nothing was
        printed to standard output, because that is where commands print their results.
        """
        with nothing_is_printed(capfd), self.nothing_is_left(kept=tmp_path):
            self._log(tmp_path, STEPS)

    # Internal methods

    def _build(self, run_dir: Path) -> Logger:
        logger: Logger = self.build()(self.make_options(), run_dir)
        return logger

    def _started(self, run_dir: Path) -> Logger:
        logger = self._build(run_dir)
        logger.start(copy.deepcopy(dict(CONFIG)))
        return logger

    def _log(self, run_dir: Path, steps: Mapping[int, Mapping[str, float]]) -> None:
        logger = self._started(run_dir)
        for step, metrics in steps.items():
            logger.log(step, metrics)
        logger.close()

    def _assert_stored(self, run_dir: Path, steps: Mapping[int, Mapping[str, float]], *, exactly: bool = True) -> None:
        read_back = type(self).read_back
        if read_back is None:
            not_applicable("the suite sets no read_back")
        assert read_back is not None
        found = {(step, name): value for step, name, value in read_back(run_dir)}
        wanted = {(step, name): value for step, metrics in steps.items() for name, value in metrics.items()}
        missing = sorted(key for key in wanted if key not in found)
        assert not missing, f"not stored: {missing}"
        for key, value in wanted.items():
            assert found[key] == pytest.approx(value, rel=1e-6), f"{key} is {found[key]} instead of {value}"
        if exactly:
            more = sorted(key for key in found if key not in wanted)
            assert not more, f"stored besides: {more[:5]}"
