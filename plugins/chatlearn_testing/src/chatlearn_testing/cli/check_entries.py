"""The checks that ``chatlearn plugins check`` runs on each plugin, in a child process that may hang or crash."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from packaging.utils import canonicalize_name

from chatlearn_core.exceptions import ChatLearnError, PluginError
from chatlearn_core.plugins.entry import PluginEntry
from chatlearn_core.plugins.exits import CODE_FIELDS
from chatlearn_core.plugins.import_string import resolve_import_string
from chatlearn_core.plugins.loader import describe, discover_plugins
from chatlearn_core.plugins.markers import PROJECT
from chatlearn_core.plugins.records import DatasetSpec, FlowMethodSpec, Kind, PluginRecord
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.plugins.sources import CORE
from chatlearn_core.plugins.validation import record_problems
from chatlearn_testing.required_settings import REQUIRED

STACK_SIGNAL = signal.SIGUSR2
"""Signal on which the child writes the stacks of its threads."""
CALLED_FIELDS = ("function", "action", "other_samples")
"""Further fields that name code: of records whose package is not that of this code alone."""
CORE_PACKAGE = "chatlearn_core"
CORE_SETTINGS = "chatlearn_testing.core_conformance"
SETTINGS_MODULE = "conformance"
"""Name of the module ``<package>.conformance``, whose ``SETTINGS`` configure the suites for the package's plugins."""
SUITE_NAMES: Mapping[Kind, str] = {
    "trainer": "TrainerConformance",
    "generator": "GeneratorConformance",
    "reward": "RewardConformance",
    "weight_sync": "WeightSyncConformance",
    "runtime": "RuntimeConformance",
    "algorithm": "AlgorithmConformance",
    "dataset": "DatasetConformance",
    "logger": "LoggerConformance",
    "sampler": "SamplerConformance",
    "environment": "EnvironmentConformance",
    "tool": "ToolConformance",
    "launcher": "LauncherConformance",
    "model_family": "ModelFamilyConformance",
    "schedule": "ScheduleConformance",
    "step_policy": "StepPolicyConformance",
    "sample_filter": "SampleFilterConformance",
    "aggregation": "AggregationConformance",
    "example_kind": "ExampleKindConformance",
    "flow_method": "FlowMethodConformance",
    "output": "OutputConformance",
    "cli_command": "CliCommandConformance",
    "rollout_mode": "RolloutModeConformance",
}
"""Classes of ``chatlearn_testing.suites``, whose import takes seconds."""
READER_SUITE = "ReaderConformance"
"""The suite of datasets that read files."""

Settings = Mapping[str, Mapping[str, Any]]
"""``kind/name`` -> attributes of the suite (``options``, ``cases``, ...). For trainers and generators also
``load_reference`` and ``build_model``, import strings of ``(directory) -> module`` and ``(directory) -> directory``."""
Report = Callable[..., None]
"""Called with ``check`` and the fields of a ``Check`` before its tests, with ``test`` and the name of a test that
starts, and with ``verdict``, a test's name, its result and the reason.
"""


@dataclass(slots=True)
class TestRun:
    """One run of a contract test."""

    __test__ = False  # pytest must not collect it as a test class

    name: str
    verdict: Literal["passed", "failed", "skipped"]
    reason: str
    """Why it failed or does not apply."""
    seconds: float


@dataclass(slots=True)
class Check:
    """One suite on one plugin."""

    kind: str
    name: str
    suite: str
    passed: int = 0
    failures: list[str] = field(default_factory=list)
    """``test: reason``"""
    not_applicable: list[str] = field(default_factory=list)
    """``test: reason``"""
    not_run: str = ""
    """Reason why the suite did not run; empty if it did."""
    tests: list[TestRun] = field(default_factory=list)
    """Every test of a suite; a record's checks are not listed."""

    @property
    def verdict(self) -> Literal["passed", "failed", "not run"]:
        """Result of the check: failed if any test failed, passed if at least one passed."""
        if self.failures:
            return "failed"
        return "passed" if self.passed else "not run"


def entries_in(registry: PluginRegistry, distribution: str) -> list[PluginEntry]:
    """Return the plugins that a distribution registers, in the order of their checks."""
    wanted = canonicalize_name(distribution)
    return [entry for entry in registry.entries if canonicalize_name(entry.distribution) == wanted]


def check_entry(
    registry: PluginRegistry,
    entry: PluginEntry,
    model: Path | None,
    reference: str | None,
    report: Report,
    done: Collection[str] = (),
) -> None:
    """Check a plugin's record, then run the suite for its kind.

    Args:
        done: tests that have run in an earlier child; if there are any, the record was checked there too.
    """
    record = entry.record
    assert record is not None
    if not done:
        report("check", asdict(check_record(registry, record)))
    check_suite(record, package_of(record, entry.distribution), model, reference, report, done)


def check_record(registry: PluginRegistry, record: PluginRecord) -> Check:
    """Check a record of any kind: the code that it names can be imported, and unknown options are errors."""
    found = Check(record.kind, record.name, "record")
    for attribute in (name for name in (*CODE_FIELDS, *CALLED_FIELDS) if getattr(record, name, None)):
        try:
            registry.load_factory(record, attribute)
            found.passed += 1
        except PluginError as error:
            found.failures.append(f"{attribute} can be imported: {error}")
    for attribute in (name for name in ("options", "arguments") if hasattr(record, name)):
        try:
            strict = registry.load_options(record, attribute).model_config.get("extra") == "forbid"
        except PluginError as error:
            found.failures.append(f"{attribute} can be imported: {error}")
            return found
        if strict or takes_any_argument(record):
            found.passed += 1
        else:
            found.failures.append(
                f"unknown {attribute} are errors: {getattr(record, attribute)} ignores a misspelled one; "
                'set model_config = ConfigDict(extra="forbid")'
            )
    if not found.passed and not found.failures:  # a record alone, which names no code
        found.passed = 1
        if problems := record_problems(record):
            found.passed, found.failures = 0, problems
    return found


def is_reader(record: PluginRecord) -> bool:
    """Whether a record is of a reader of files, which gives rows and no format of them."""
    return isinstance(record, DatasetSpec) and bool(record.reads)


def takes_any_argument(record: PluginRecord) -> bool:
    """Whether a record is a flow method that calls a user's function, whose signature the arguments must fit."""
    return isinstance(record, FlowMethodSpec) and record.role_kind == "function"


def check_suite(
    record: PluginRecord,
    package: str,
    model: Path | None,
    reference: str | None,
    report: Report,
    done: Collection[str],
) -> None:
    """Run the conformance suite of a record's kind, if its settings are complete.

    Args:
        package: has the module with the settings.
    """
    found = Check(record.kind, record.name, READER_SUITE if is_reader(record) else SUITE_NAMES[record.kind])
    key = f"{record.kind}/{record.name}"
    try:
        settings = dict(load_settings(package).get(key, {}))
    except (Exception, SystemExit) as error:  # the plugin's own module may raise anything
        found.failures.append(f"settings: {settings_module(package)}: {describe(error)}")
        report("check", asdict(found))
        return
    build_model = settings.pop("build_model", None)
    load_reference = reference or settings.pop("load_reference", None)
    settings.pop("load_reference", None)
    if missing := missing_settings(record, package, settings, model or build_model, load_reference):
        found.not_run = missing
        report("check", asdict(found))
        return
    report("check", asdict(found))
    from chatlearn_testing.check import run_conformance  # imports pytest and torch

    with tempfile.TemporaryDirectory(prefix="chatlearn-check-") as scratch:
        try:
            directory = model or (resolve_import_string(build_model)(Path(scratch) / "model") if build_model else None)
            run_conformance(
                [record],
                model_directory=directory,
                load_reference=load_reference,
                settings={key: settings},
                done=done,
                on_begin=lambda test: report("test", test),
                on_verdict=lambda verdict: report("verdict", verdict.test, verdict.verdict, verdict.reason),
            )
        except (ChatLearnError, ImportError, OSError, SystemExit) as error:
            report("verdict", "", "failed", f"the suite could not be run: {describe(error)}")


def missing_settings(
    record: PluginRecord, package: str, settings: Mapping[str, Any], model: object, reference: object
) -> str:
    """Return which required setting is missing and how to provide it; empty if none is missing."""
    where = f"{settings_module(package)}:SETTINGS[{f'{record.kind}/{record.name}'!r}]"
    if record.kind in ("trainer", "generator"):
        if not model:
            return f"no model to test on: give --model, or 'build_model' in {where}"
        if not reference:
            return f"nothing to compare with: give --reference, or 'load_reference' in {where}"
    name, what = REQUIRED.get(record.kind, ("", ""))
    if is_reader(record):
        what = "files with known rows"
    return f"no {what}: give {name!r} in {where}" if name and name not in settings else ""


def settings_module(package: str) -> str:
    """Return the module with the settings for a package; the kit has those for the core, which does not import it."""
    return CORE_SETTINGS if package == CORE_PACKAGE else f"{package}.{SETTINGS_MODULE}"


def load_settings(package: str) -> Settings:
    """Import ``SETTINGS`` for a plugin's package; empty if it has no such module, or is a single module."""
    name = settings_module(package)
    try:
        if find_spec(name) is None:
            return {}
    except ModuleNotFoundError as error:
        if error.name != name:  # that of a parent that is no package
            raise
        return {}
    settings: Settings = importlib.import_module(name).SETTINGS
    return settings


def package_of(record: PluginRecord, distribution: str) -> str:
    """Return the top-level package of a record's code; of a record whose code may be another distribution's, the one of
    its distribution's entry point.
    """
    code: str = next((getattr(record, name) for name in (*CODE_FIELDS, "function") if hasattr(record, name)), "")
    if not code and distribution != CORE:
        code = next(point.value for point in metadata.entry_points(group=PROJECT) if _is_of(point, distribution))
    return (code or CORE_PACKAGE).partition(":")[0].partition(".")[0]


def _is_of(point: metadata.EntryPoint, distribution: str) -> bool:
    return point.dist is not None and canonicalize_name(point.dist.name) == canonicalize_name(distribution)


def main() -> None:
    """Run in the child process: read the job from standard input and report JSON lines."""
    job = json.loads(sys.stdin.buffer.read())
    sys.path[:] = job["path"]
    faulthandler.register(STACK_SIGNAL, file=job["stacks"], all_threads=True)

    def report(kind: str, *content: Any) -> None:
        line = json.dumps([kind, *content]) + "\n"
        with os.fdopen(os.dup(job["report"]), "wb") as pipe:
            pipe.write(line.encode())

    registry = discover_plugins()
    entries = {f"{entry.kind}/{entry.name}": entry for entry in entries_in(registry, job["distribution"])}
    model = Path(job["model"]) if job["model"] is not None else None
    for number, (key, done) in enumerate(job["entries"]):
        report("entry", number)
        check_entry(registry, entries[key], model, job["reference"], report, done)
    report("end")
    os._exit(0)  # plugins may have left threads that would block a normal exit
