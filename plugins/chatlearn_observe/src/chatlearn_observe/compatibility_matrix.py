"""The table of ``chatlearn plugins matrix``: what records declare, beside what a recorded kit run has shown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from chatlearn_core.exceptions import PluginError
from chatlearn_core.plugins.compatibility import mismatches
from chatlearn_core.plugins.entry import PluginEntry
from chatlearn_core.plugins.records import GeneratorSpec, Reach, TrainerSpec, WeightSyncSpec
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.plugins.report import table

MATRIX_HEADER = ("TRAINER", "GENERATOR", "WEIGHT SYNC", "DECLARED", "TESTED", "")
Combination = tuple[str, str, str]
"""Names of trainer, generator and transport."""
TESTED_RULE = (
    '{"results": [{"trainer": NAME, "generator": NAME, "weight_sync": NAME, "passed": true, "detail": TEXT}, ...]}'
)


@dataclass(slots=True, frozen=True)
class TestResult:
    """What a recorded run of one combination has shown."""

    __test__ = False  # not a test class, whatever pytest thinks of its name

    passed: bool
    detail: str = ""
    """Versions and date of the run, or how it failed."""


@dataclass(slots=True, frozen=True, kw_only=True)
class MatrixRow:
    """One combination."""

    trainer: str
    generator: str
    weight_sync: str
    fits: bool
    """Declared: there is a placement at which it works."""
    reach: Reach
    """How far apart trainer and generator may be."""
    reasons: tuple[str, ...]
    """Why it does not fit."""
    missing: tuple[str, ...]
    """Engines that are not installed here; what is declared does not depend on them."""
    tested: TestResult | None
    """None: not in the recorded run."""


def compatibility_matrix(
    registry: PluginRegistry, tested: Mapping[Combination, TestResult] | None = None
) -> list[MatrixRow]:
    """Every combination of the registered trainers, generators and transports."""
    rows = []
    for trainer, generator, transport in product(
        usable(registry, "trainer"), usable(registry, "generator"), usable(registry, "weight_sync")
    ):
        records = (trainer.record, generator.record, transport.record)
        match records:
            case (TrainerSpec(), GeneratorSpec(), WeightSyncSpec()):
                reasons = mismatches(*records, placement="process")
                reach = records[2].reach
            case _:
                raise AssertionError(f"the registry checks record types, but holds {records}")
        rows.append(
            MatrixRow(
                trainer=trainer.name,
                generator=generator.name,
                weight_sync=transport.name,
                fits=not reasons,
                reach=reach,
                reasons=tuple(reasons),
                missing=tuple(
                    f"{entry.title}: {entry.reason}"
                    for entry in (trainer, generator, transport)
                    if entry.status == "missing-engine"
                ),
                tested=(tested or {}).get((trainer.name, generator.name, transport.name)),
            )
        )
    return rows


def usable(registry: PluginRegistry, kind: str) -> list[PluginEntry]:
    """The entries whose records say something: those that work, and those that only lack their engine here."""
    return [entry for entry in registry.entries if entry.kind == kind and entry.status in ("ok", "missing-engine")]


def read_tested(path: Path) -> dict[Combination, TestResult]:
    """Read a recorded kit run.

    Raises:
        PluginError: the file is missing or is no such record; names the file, the item and the rule.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        results = content["results"]
        return {
            (item["trainer"], item["generator"], item["weight_sync"]): TestResult(
                passed=strict_bool(item["passed"]), detail=str(item.get("detail", ""))
            )
            for item in results
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PluginError(
            f"{path} is not a recorded run of the conformance kit: {type(error).__name__}: {error}\n"
            f"  It must be JSON of the form {TESTED_RULE}"
        ) from error


def read_environment(path: Path) -> dict[str, str]:
    """The versions that a recorded kit run was made with, by distribution; none if it does not say.

    Raises:
        PluginError: what it says is no mapping.
    """
    environment = json.loads(path.read_text(encoding="utf-8")).get("environment", {})
    if not isinstance(environment, dict):
        raise PluginError(f"{path}: environment is {environment!r}; it must map distributions to versions")
    return {name: str(version) for name, version in environment.items()}


def strict_bool(value: object) -> bool:
    """The value, which must be true or false and nothing that merely counts as such."""
    if not isinstance(value, bool):
        raise TypeError(f"passed is {value!r}; it must be true or false")
    return value


def matrix_json(rows: Sequence[MatrixRow]) -> dict[str, object]:
    """The table as plain data."""
    return {"combinations": [asdict(row) for row in rows]}


def matrix_text(rows: Sequence[MatrixRow], environment: Mapping[str, str] | None = None) -> str:
    """The table of ``chatlearn plugins matrix``, and under it the versions that the tests were run with."""
    text = table(MATRIX_HEADER, list(matrix_cells(rows)))
    if not environment:
        return text
    versions = ", ".join(f"{name} {version}" for name, version in environment.items())
    return f"{text}\n\ntested with {versions}; --json has the cases"


def matrix_cells(rows: Sequence[MatrixRow]) -> Iterator[tuple[str, ...]]:
    """One line a combination."""
    reach = {"process": "one process", "host": "one host", "anywhere": "anywhere"}
    for row in rows:
        tested = "-" if row.tested is None else "passed" if row.tested.passed else "failed"
        notes = [*row.reasons, *row.missing]
        if row.tested is not None and not row.tested.passed and row.tested.detail:
            notes.append(row.tested.detail)
        declared = f"yes, {reach[row.reach]}" if row.fits else "no"
        yield row.trainer, row.generator, row.weight_sync, declared, tested, "; ".join(notes)
