"""``chatlearn plugins check``: what the conformance suites say of an installed distribution."""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from packaging.utils import canonicalize_name

from chatlearn_core.exceptions import ChatLearnError, PluginError, PluginNotFoundError
from chatlearn_core.plugins.entry import PluginEntry
from chatlearn_core.plugins.import_string import resolve_import_string
from chatlearn_core.plugins.loader import describe, discover_plugins
from chatlearn_core.plugins.records import PluginRecord
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.plugins.report import table
from chatlearn_core.plugins.sources import did_you_mean

EXIT_FAILED = 1
SETTINGS_MODULE = "conformance"
"""``<package>.conformance`` may hold ``SETTINGS``: what the suites need to know of this distribution's plugins."""
HEADER = ("KIND", "NAME", "SUITE", "PASSED", "FAILED", "NOT APPLICABLE", "")
CODE_FIELDS = ("factory", "sender", "receiver", "app")

Settings = Mapping[str, Mapping[str, Any]]
"""``kind/name`` -> attributes of the suite (``options``, ``cases``, ...). For trainers and generators also
``load_reference`` and ``build_model``, import strings of ``(directory) -> module`` and ``(directory) -> directory``."""


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
    """Why the suite was not run at all."""

    @property
    def verdict(self) -> Literal["passed", "failed", "not run"]:
        """In a word."""
        if self.failures:
            return "failed"
        return "passed" if self.passed else "not run"


def check(
    distribution: Annotated[str, typer.Argument(help="An installed distribution, such as chatlearn-fsdp.")],
    model: Annotated[
        Path | None, typer.Option(help="A small float32 model directory to test trainers and generators on.")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(help="module:function that loads --model as a plain module (token_ids [T] -> logits [T, V])."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run the conformance suites on every plugin of a distribution; exit code 1 if one fails."""
    registry = discover_plugins()
    entries = entries_of(registry, distribution)
    require_pytest()
    checks = [found for entry in entries for found in check_entry(registry, entry, model, reference)]
    if as_json:
        rows = [{**asdict(found), "verdict": found.verdict} for found in checks]
        typer.echo(json.dumps({"distribution": entries[0].distribution, "checks": rows}, indent=2))
    else:
        typer.echo(checks_text(checks))
    if any(found.failures for found in checks):
        raise typer.Exit(EXIT_FAILED)


def entries_of(registry: PluginRegistry, distribution: str) -> list[PluginEntry]:
    """What a distribution registers.

    Raises:
        PluginNotFoundError: nothing, or it is not installed; names the nearest that does.
    """
    wanted = canonicalize_name(distribution)
    entries = [entry for entry in registry.entries if canonicalize_name(entry.distribution) == wanted]
    if entries:
        return entries
    known = sorted({str(canonicalize_name(entry.distribution)) for entry in registry.entries})
    try:
        version = metadata.version(distribution)
    except (metadata.PackageNotFoundError, ValueError):
        raise PluginNotFoundError(
            f"No distribution named {distribution!r} is installed; `chatlearn plugins list` shows those with plugins."
            + did_you_mean(wanted, known)
        ) from None
    raise PluginNotFoundError(
        f"{distribution} {version} is installed and registers nothing: it has no entry point in the group 'chatlearn', "
        "or its hooks return no records."
    )


def require_pytest() -> None:
    """The suites are pytest classes.

    Raises:
        PluginError: pytest is not installed.
    """
    if find_spec("pytest") is None:
        raise PluginError("The conformance suites need pytest: pip install 'chatlearn-core[testing]'")


def check_entry(registry: PluginRegistry, entry: PluginEntry, model: Path | None, reference: str | None) -> list[Check]:
    """The record itself, then the suite for its kind."""
    record = entry.record
    kind = entry.kind or "?"
    if record is None or entry.status != "ok":
        return [Check(kind, entry.name, "record", failures=[f"status: {entry.status}: {entry.reason}"])]
    return [check_record(registry, record), check_suite(record, model, reference)]


def check_record(registry: PluginRegistry, record: PluginRecord) -> Check:
    """What holds for every kind: the code that it names can be imported, and unknown options are errors."""
    found = Check(record.kind, record.name, "record")
    for attribute in (name for name in CODE_FIELDS if hasattr(record, name)):
        try:
            registry.load_factory(record, attribute)
            found.passed += 1
        except PluginError as error:
            found.failures.append(f"{attribute} can be imported: {error}")
    if hasattr(record, "options"):
        try:
            strict = registry.load_options(record).model_config.get("extra") == "forbid"
        except PluginError as error:
            found.failures.append(f"options can be imported: {error}")
            return found
        if strict:
            found.passed += 1
        else:
            found.failures.append(
                f"unknown options are errors: {record.options} ignores a misspelled option; "
                'set model_config = ConfigDict(extra="forbid")'
            )
    return found


def check_suite(record: PluginRecord, model: Path | None, reference: str | None) -> Check:
    """The conformance suite, where there is one and what it needs is known."""
    from chatlearn_core.testing.check import SUITES, run_conformance  # imports pytest and torch

    if record.kind not in SUITES:
        return Check(record.kind, record.name, "none", not_run=f"there is no suite for the kind {record.kind}")
    found = Check(record.kind, record.name, SUITES[record.kind].__name__)
    try:
        settings = dict(load_settings(record).get(f"{record.kind}/{record.name}", {}))
    except Exception as error:  # the plugin's own module may raise anything
        found.failures.append(f"settings: {package_of(record)}.{SETTINGS_MODULE}: {describe(error)}")
        return found
    with tempfile.TemporaryDirectory(prefix="chatlearn-check-") as scratch:
        build_model = settings.pop("build_model", None)
        load_reference = reference or settings.pop("load_reference", None)
        settings.pop("load_reference", None)
        if missing := missing_settings(record, settings, model or build_model, load_reference):
            found.not_run = missing
            return found
        try:
            directory = model or (resolve_import_string(build_model)(Path(scratch) / "model") if build_model else None)
            results = run_conformance(
                [record],
                model_directory=directory,
                load_reference=load_reference,
                settings={f"{record.kind}/{record.name}": settings},
            )
        except (ChatLearnError, ImportError, OSError) as error:
            found.failures.append(f"the suite could not be run: {describe(error)}")
            return found
    found.passed = len(results.of("passed"))
    found.failures = [f"{verdict.test}: {verdict.reason}" for verdict in results.of("failed")]
    found.not_applicable = [f"{verdict.test}: {verdict.reason}" for verdict in results.of("skipped")]
    return found


def missing_settings(record: PluginRecord, settings: Mapping[str, Any], model: object, reference: object) -> str:
    """What the suite would need and nobody gave, and how to give it; empty if nothing."""
    where = f"{package_of(record)}.{SETTINGS_MODULE}:SETTINGS[{f'{record.kind}/{record.name}'!r}]"
    if record.kind in ("trainer", "generator"):
        if not model:
            return f"no model to test on: give --model, or 'build_model' in {where}"
        if not reference:
            return f"nothing to compare with: give --reference, or 'load_reference' in {where}"
    if record.kind == "reward" and "cases" not in settings:
        return f"no samples with known rewards: give 'cases' in {where}"
    return ""


def load_settings(record: PluginRecord) -> Settings:
    """``SETTINGS`` of the plugin's package; empty where it has none."""
    name = f"{package_of(record)}.{SETTINGS_MODULE}"
    if find_spec(name) is None:
        return {}
    settings: Settings = importlib.import_module(name).SETTINGS
    return settings


def package_of(record: PluginRecord) -> str:
    """The top-level package of a record's code."""
    code: str = next(getattr(record, name) for name in CODE_FIELDS if hasattr(record, name))
    return code.partition(":")[0].partition(".")[0]


def checks_text(checks: list[Check]) -> str:
    """A table, and below it every failure and everything that did not apply, with the reason."""
    rows = [
        (
            found.kind,
            found.name,
            found.suite,
            str(found.passed),
            str(len(found.failures)),
            str(len(found.not_applicable)),
            found.not_run or found.verdict,
        )
        for found in checks
    ]
    lines = [table(HEADER, rows)]
    for title, attribute in (("failed", "failures"), ("not applicable", "not_applicable")):
        told = [(found, line) for found in checks for line in getattr(found, attribute)]
        if told:
            lines += ["", f"{title}:"]
            lines += [f"  {found.kind} {found.name}: " + line.replace("\n", "\n    ") for found, line in told]
    return "\n".join(lines)
