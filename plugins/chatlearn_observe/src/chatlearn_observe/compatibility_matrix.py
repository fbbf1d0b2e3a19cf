"""The table of ``chatlearn plugins matrix``: declared compatibility, next to the results of a recorded test run."""

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
from chatlearn_core.plugins.table import table

MATRIX_HEADER = ("TRAINER", "GENERATOR", "WEIGHT SYNC", "DECLARED", "TESTED", "")
Combination = tuple[str, str, str]
"""Names of trainer, generator and transport, such as ``("fsdp", "vllm", "shared_memory")``."""
TESTED_RULE = (
    '{"results": [{"trainer": NAME, "generator": NAME, "weight_sync": NAME, "passed": true, "detail": TEXT}, ...]}'
)


@dataclass(slots=True, frozen=True)
class TestResult:
    """Result of one combination in a recorded test run."""

    __test__ = False  # not a test class, despite its name

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
    """Whether, by declaration, some placement makes the combination work."""
    reach: Reach
    """How far apart trainer and generator may be."""
    reasons: tuple[str, ...]
    """Why the combination does not work."""
    missing: tuple[str, ...]
    """Engines that are not installed here; the declarations do not depend on them."""
    tested: TestResult | None
    """None if the recorded run does not contain the combination."""


def compatibility_matrix(
    registry: PluginRegistry, tested: Mapping[Combination, TestResult] | None = None
) -> list[MatrixRow]:
    """Return every combination of the registered trainers, generators and transports."""
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
    """Return the entries with usable records: those that work, and those that only lack their engine here."""
    return [entry for entry in registry.entries if entry.kind == kind and entry.status in ("ok", "missing-engine")]


def read_tested(path: Path) -> dict[Combination, TestResult]:
    """Read the record of a conformance test run.

    Raises:
        PluginError: the file is missing or not such a record; names the file, the item and the rule.
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
    """Return distribution -> version of a recorded test run; empty if the record has none.

    Raises:
        PluginError: the entry is not a mapping.
    """
    environment = json.loads(path.read_text(encoding="utf-8")).get("environment", {})
    if not isinstance(environment, dict):
        raise PluginError(f"{path}: environment is {environment!r}; it must map distributions to versions")
    return {name: str(version) for name, version in environment.items()}


def strict_bool(value: object) -> bool:
    """Return the value if it is exactly true or false; raise a ``TypeError`` otherwise."""
    if not isinstance(value, bool):
        raise TypeError(f"passed is {value!r}; it must be true or false")
    return value


def matrix_json(rows: Sequence[MatrixRow]) -> dict[str, object]:
    """Return the table as plain data."""
    return {"combinations": [asdict(row) for row in rows]}


def matrix_text(rows: Sequence[MatrixRow], environment: Mapping[str, str] | None = None) -> str:
    """Return the table of ``chatlearn plugins matrix``, followed by the versions of the test run."""
    text = table(MATRIX_HEADER, list(matrix_cells(rows)))
    if not environment:
        return text
    versions = ", ".join(f"{name} {version}" for name, version in environment.items())
    return f"{text}\n\ntested with {versions}; --json has the cases"


def matrix_cells(rows: Sequence[MatrixRow]) -> Iterator[tuple[str, ...]]:
    """Yield one table line per combination."""
    reach = {"process": "one process", "host": "one host", "anywhere": "anywhere"}
    for row in rows:
        tested = "-" if row.tested is None else "passed" if row.tested.passed else "failed"
        notes = [*row.reasons, *row.missing]
        if row.tested is not None and not row.tested.passed and row.tested.detail:
            notes.append(row.tested.detail)
        declared = f"yes, {reach[row.reach]}" if row.fits else "no"
        yield row.trainer, row.generator, row.weight_sync, declared, tested, "; ".join(notes)
