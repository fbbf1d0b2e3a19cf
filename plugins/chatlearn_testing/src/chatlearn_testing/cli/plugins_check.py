"""``chatlearn plugins check``: runs the conformance suites on an installed distribution."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from packaging.utils import canonicalize_name

from chatlearn_core.exceptions import PluginNotFoundError
from chatlearn_core.plugins.entry import PluginEntry
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.plugins.sources import did_you_mean
from chatlearn_core.plugins.table import table
from chatlearn_testing.cli.check_entries import Check, entries_in
from chatlearn_testing.cli.check_results import CheckResult, check_result_file, merged
from chatlearn_testing.stress import in_round

EXIT_FAILED, EXIT_NOT_RUN = 1, 3
HEADER = ("KIND", "NAME", "SUITE", "PASSED", "FAILED", "NOT APPLICABLE", "")
DEFAULT_TEST_LIMIT_S = 600.0
DEFAULT_LIMIT_S = 3600.0


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
    output: Annotated[
        list[Path] | None,
        typer.Option(help="Also write the result to a file: .json, or .xml for JUnit. Repeatable."),
    ] = None,
    stress: Annotated[
        int,
        typer.Option(min=1, help="Run the suites this often, after the first time with other seeds and more draws."),
    ] = 1,
    test_timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds after which one test counts as hanging; the others go on.")
    ] = DEFAULT_TEST_LIMIT_S,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds for everything, each time with --stress.")
    ] = DEFAULT_LIMIT_S,
) -> None:
    """Run the conformance suites on every plugin of a distribution.

    Exit code 1 if a test fails, 3 if a plugin's suite could not be run.
    """
    for file in output or ():
        check_result_file(file)
    registry = discover_plugins()
    entries = entries_of(registry, distribution)
    usable = [entry for entry in entries if entry.record is not None and entry.status == "ok"]
    checks = [
        Check(entry.kind or "?", entry.name, "record", failures=[f"status: {entry.status}: {entry.reason}"])
        for entry in entries
        if entry not in usable
    ]
    if usable:
        from chatlearn_testing.cli.check_children import run_checks  # imports torch, which `plugins list` need not

        limits = {"test_limit_s": test_timeout, "limit_s": timeout}
        rounds = []
        for number in range(stress):
            with in_round(number):
                rounds.append(run_checks(usable[0].distribution, usable, model, reference, **limits))
        checks += merged(rounds)
    result = CheckResult(entries[0].distribution, checks, stress)
    for file in output or ():
        result.write(file)
    if as_json:
        typer.echo(json.dumps(result.as_json(), indent=2))
    else:
        typer.echo(checks_text(checks))
        if result.verdict == "passed":
            typer.echo(f"\nFor the README of {result.distribution}:\n{result.badge()}")
        elif result.verdict == "not run":
            typer.echo("\nNothing failed, but not every plugin was tested, so this is no pass (exit code 3).")
    if result.verdict != "passed":
        raise typer.Exit(EXIT_FAILED if result.verdict == "failed" else EXIT_NOT_RUN)


def entries_of(registry: PluginRegistry, distribution: str) -> list[PluginEntry]:
    """Return the plugins that a distribution registers.

    Raises:
        PluginNotFoundError: it is not installed, or registers no plugin; suggests a distribution of a similar name.
    """
    entries = entries_in(registry, distribution)
    if entries:
        return entries
    wanted = canonicalize_name(distribution)
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


def checks_text(checks: list[Check]) -> str:
    """Format a table of the checks, followed by every failed and inapplicable test with its reason."""
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
