"""Runs the suites on plugin records without a test file; ``chatlearn plugins check`` uses this."""

from __future__ import annotations

import io
import os
import sys
import tempfile
import uuid
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest

from chatlearn_core.exceptions import PluginError
from chatlearn_core.plugins.records import DatasetSpec, PluginRecord
from chatlearn_testing.applicability import NOT_APPLICABLE
from chatlearn_testing.guard import suite_violations
from chatlearn_testing.required_settings import REQUIRED
from chatlearn_testing.suites import (
    AggregationConformance,
    AlgorithmConformance,
    CliCommandConformance,
    ConformanceSuite,
    DatasetConformance,
    EnvironmentConformance,
    ExampleKindConformance,
    FlowMethodConformance,
    GeneratorConformance,
    LauncherConformance,
    LoggerConformance,
    ModelFamilyConformance,
    OutputConformance,
    ReaderConformance,
    RewardConformance,
    RolloutModeConformance,
    RuntimeConformance,
    SampleFilterConformance,
    SamplerConformance,
    ScheduleConformance,
    StepPolicyConformance,
    ToolConformance,
    TrainerConformance,
    WeightSyncConformance,
)
from chatlearn_testing.suites.conformance_suite import ReferenceLoader
from chatlearn_testing.suites.model_suite import ModelSuite

Verdict = Literal["passed", "failed", "skipped"]
SUITES: Mapping[str, type[ConformanceSuite]] = {
    suite.kind: suite
    for suite in (
        TrainerConformance,
        GeneratorConformance,
        RewardConformance,
        WeightSyncConformance,
        RuntimeConformance,
        AlgorithmConformance,
        DatasetConformance,
        LoggerConformance,
        SamplerConformance,
        EnvironmentConformance,
        ToolConformance,
        LauncherConformance,
        ModelFamilyConformance,
        ScheduleConformance,
        StepPolicyConformance,
        SampleFilterConformance,
        AggregationConformance,
        ExampleKindConformance,
        FlowMethodConformance,
        OutputConformance,
        CliCommandConformance,
        RolloutModeConformance,
    )
}
TEST_FILE = """\
from chatlearn_testing.check import generated_suites

globals().update(generated_suites())
"""


@dataclass(slots=True, frozen=True)
class TestVerdict:
    """The result of one contract test on one backend."""

    __test__ = False  # pytest must not collect it as a test class

    record: str
    """``kind/name``"""
    test: str
    """Name of the contract test, with its parameters."""
    verdict: Verdict
    reason: str = ""
    """Why the test failed or was skipped; empty if it passed."""


@dataclass(slots=True)
class Results:
    """All verdicts of one run, in the order of the tests."""

    verdicts: list[TestVerdict] = field(default_factory=list)
    output: str = ""
    """Output of pytest."""

    def of(self, verdict: Verdict) -> list[TestVerdict]:
        """Return the results with this verdict."""
        return [entry for entry in self.verdicts if entry.verdict == verdict]

    @property
    def conforms(self) -> bool:
        """Whether at least one test passed and none failed."""
        return bool(self.of("passed")) and not self.of("failed")


def suites_for(record: PluginRecord) -> type[ConformanceSuite]:
    """Return the suite for a record's kind; readers of files have one of their own."""
    return ReaderConformance if isinstance(record, DatasetSpec) and record.reads else SUITES[record.kind]


def suite_class(
    record: PluginRecord,
    *,
    model_directory: Path | None = None,
    load_reference: ReferenceLoader | str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> type[ConformanceSuite]:
    """Build the subclass of a suite that a plugin's author would write.

    Args:
        record: the backend under test.
        model_directory: for trainers and generators: a small float32 model.
        load_reference: for trainers and generators: a ``ReferenceLoader`` or its import string.
        settings: further attributes in the suite's ``settable`` (such as ``options``, ``cases``).

    Raises:
        PluginError: a required argument is missing, or a setting is not settable.
    """
    suite = suites_for(record)
    body: dict[str, Any] = {"backend": record, "__module__": __name__} | dict(settings or {})
    if issubclass(suite, ModelSuite):
        if model_directory is None or load_reference is None:
            raise PluginError(
                f"{record.kind} {record.name!r} is tested on a model: pass a model directory and a load_reference"
            )
        body |= {"load_reference": load_reference, "model_directory": _directory_fixture(model_directory)}
    name, what = REQUIRED.get(record.kind, ("", ""))
    if name and name not in body:
        raise PluginError(f"{record.kind} {record.name!r} is tested on {what}: pass them in settings[{name!r}]")
    name = "".join(
        part.capitalize() for part in (*record.name.replace("-", "_").split("_"), record.kind.split("_")[-1])
    )
    made = type(f"Test{name}", (suite,), body)
    if lines := suite_violations(made):
        raise PluginError("\n".join(lines))
    return made


def run_conformance(
    records: Iterable[PluginRecord],
    *,
    model_directory: Path | None = None,
    load_reference: ReferenceLoader | str | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    select: Sequence[str] = (),
    done: Collection[str] = (),
    on_begin: Callable[[str], None] | None = None,
    on_verdict: Callable[[TestVerdict], None] | None = None,
) -> Results:
    """Run the suites on records with pytest, in this process.

    Args:
        records: backends.
        model_directory: for trainers and generators: a small float32 model.
        load_reference: loads that model with code that is not under test.
        settings: ``kind/name`` -> attributes that a subclass would set.
        select: names of contract tests to run, without parameters; empty: all.
        done: names of tests to omit, with parameters.
        on_begin: called with the name of each test before it runs.
        on_verdict: called with each result as soon as it is known.

    Raises:
        PluginError: see ``suite_class``.
    """
    classes: dict[str, type[ConformanceSuite]] = {}
    for record in records:
        key = f"{record.kind}/{record.name}"
        own = (settings or {}).get(key)
        classes[key] = suite_class(record, model_directory=model_directory, load_reference=load_reference, settings=own)
    return run_suites(classes, select=select, done=done, on_begin=on_begin, on_verdict=on_verdict)


def run_suites(
    classes: Mapping[str, type[ConformanceSuite]],
    *,
    select: Sequence[str] = (),
    done: Collection[str] = (),
    on_begin: Callable[[str], None] | None = None,
    on_verdict: Callable[[TestVerdict], None] | None = None,
) -> Results:
    """Run suite classes; results carry the name under which each class is given. See ``run_conformance``."""
    unique = {
        f"Test{index}{cls.__name__.removeprefix('Test')}": (key, cls)
        for index, (key, cls) in enumerate(classes.items())
    }
    if unknown := [name for name in select if not any(hasattr(cls, name) for cls in classes.values())]:
        raise PluginError(f"no contract test of these suites is named {', '.join(unknown)}")
    records = {name: key for name, (key, _) in unique.items()}
    collector = _Collector(records, frozenset(select), frozenset(done), on_begin, on_verdict)
    printed = io.StringIO()
    token = _GENERATED.set({name: cls for name, (_, cls) in unique.items()})
    try:
        with (
            tempfile.TemporaryDirectory(prefix="chatlearn-conformance-") as directory,
            # Only the kit's own pytest plugin: others (timeouts, coverage, workers) belong to the caller.
            mock.patch.dict(os.environ, {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}),
            redirect_stdout(printed),
            redirect_stderr(printed),
        ):
            # A unique name: pytest would reuse an imported module of the same name.
            file = Path(directory) / f"test_{uuid.uuid4().hex}.py"
            file.write_text(TEST_FILE, encoding="utf-8")
            arguments = ["--import-mode=importlib", "--capture=no", "--tb=short", "--color=no", "-q", "-c", os.devnull]
            arguments += [f"--rootdir={directory}", f"--basetemp={directory}/tmp", "--noconftest"]
            arguments += ["-p", "no:cacheprovider", "-p", "chatlearn_testing.pytest_plugin", str(file)]
            status = pytest.main(arguments, plugins=[collector])
            sys.modules.pop(file.stem, None)
    finally:
        _GENERATED.reset(token)
    nothing_left = status == pytest.ExitCode.NO_TESTS_COLLECTED and bool(done)
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not nothing_left:
        raise PluginError(f"the conformance suites could not be run (pytest: {status!r}):\n{printed.getvalue()}")
    return Results(collector.verdicts, printed.getvalue())


def generated_suites() -> Mapping[str, type[ConformanceSuite]]:
    """Return the suite classes of the current run; its test file defines them."""
    return _GENERATED.get()


_GENERATED: ContextVar[Mapping[str, type[ConformanceSuite]]] = ContextVar("generated_suites")


class _Collector:
    """A pytest plugin that collects results and deselects tests outside ``select`` or inside ``done``."""

    def __init__(
        self,
        records: Mapping[str, str],
        select: frozenset[str],
        done: frozenset[str] = frozenset(),
        on_begin: Callable[[str], None] | None = None,
        on_verdict: Callable[[TestVerdict], None] | None = None,
    ) -> None:
        self._records = records
        self._select = select
        self._done = done
        self._on_begin = on_begin
        self._on_verdict = on_verdict
        self.verdicts: list[TestVerdict] = []

    def _add(self, verdict: TestVerdict) -> None:
        self.verdicts.append(verdict)
        if self._on_verdict is not None:
            self._on_verdict(verdict)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the tests that are selected and not done."""
        if self._select:
            items[:] = [item for item in items if getattr(item, "originalname", item.name) in self._select]
        items[:] = [item for item in items if item.name not in self._done]

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Report the start of a test."""
        if self._on_begin is not None:
            self._on_begin(item.name)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Record one result per test: that of the call, or of the first phase that failed or skipped."""
        report = yield
        assert item.parent is not None
        record = self._records[item.parent.name]
        if report.failed:
            reason = f"{call.excinfo.value}" if call.excinfo is not None else str(report.longrepr)
            self._add(TestVerdict(record, item.name, "failed", f"{report.when}: {reason}"))
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            reason = reason.removeprefix("Skipped: ").removeprefix(NOT_APPLICABLE)
            self._add(TestVerdict(record, item.name, "skipped", reason))
        elif report.when == "call":
            self._add(TestVerdict(record, item.name, "passed"))
        return report


def _directory_fixture(directory: Path) -> Callable[..., Path]:
    def model_directory(cls: type) -> Path:
        return directory

    fixture: Any = pytest.fixture(scope="class")
    made: Callable[..., Path] = fixture(classmethod(model_directory))
    return made
