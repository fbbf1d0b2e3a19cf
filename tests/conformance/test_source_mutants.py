"""The suites pass the templates, and fail on a sample of their mutants, in the contract test meant for each."""

from __future__ import annotations

import importlib
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import template_mutants
import torch
from source_mutants import TEMPLATE, SourceMutant, source_of, suite_of, write_mutant

from chatlearn_testing.check import Results, run_suites
from chatlearn_testing.suites import ConformanceSuite, RuntimeConformance

pytestmark = pytest.mark.slow

MUTANTS = tuple(mutant for mutant in template_mutants.MUTANTS if mutant.kind != "algorithm")
"""``test_algorithm_mutants`` has the others."""
KINDS = sorted({mutant.kind for mutant in MUTANTS})


@contextmanager
def restored_process() -> Iterator[None]:
    """Undo what mutants change for good."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    folder, dtype, variables = Path.cwd(), torch.get_default_dtype(), dict(os.environ)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        torch.set_default_dtype(dtype)
        os.chdir(folder)
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the package of a template, which is unloaded after the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ConformanceSuite, "patience_s", 10.0)  # mutants hang
    monkeypatch.setattr(RuntimeConformance, "patience_s", 30.0)  # it starts processes
    yield tmp_path / TEMPLATE
    for name in [name for name in sys.modules if name.partition(".")[0] == TEMPLATE]:
        del sys.modules[name]


def check(kind: str, package: Path, select: tuple[str, ...] = ()) -> Results:
    """Run the suite on the record that the package registers, with the package's own settings and model."""
    importlib.invalidate_caches()
    key, suite = suite_of(kind, package.name, package.parent / "model")
    with restored_process():
        return run_suites({key: suite}, select=select)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_the_original_passes(kind: str, package: Path) -> None:
    """In `make test`, the packages that `plugins new` writes run the same suites."""
    shutil.copytree(source_of(kind, TEMPLATE), package)
    results = check(kind, package)
    assert results.conforms, "\n".join(f"{verdict.test}: {verdict.reason}" for verdict in results.of("failed"))
    passed = {verdict.test.split("[")[0] for verdict in results.of("passed")}
    of_records = ("plugin.py",)  # a record that declares more makes tests apply which the original skips
    assert {mutant.caught_by for mutant in MUTANTS if mutant.kind == kind and mutant.file not in of_records} <= passed


def sample() -> Iterator[Any]:
    """The first mutant for each contract test of a kind, seven of eight of them ``thorough``, and all of runtimes,
    which start processes; ``make test-mutants`` runs all mutants.
    """
    seen: set[tuple[str, str]] = set()
    for mutant in MUTANTS:
        if (mutant.kind, mutant.caught_by) not in seen and not mutant.equivalent:
            marks = [pytest.mark.thorough] if len(seen) % 8 or mutant.kind == "runtime" else []
            seen.add((mutant.kind, mutant.caught_by))
            yield pytest.param(mutant, id=mutant.id, marks=marks)


@pytest.mark.parametrize("mutant", list(sample()))
def test_a_mutant_is_caught(mutant: SourceMutant, package: Path) -> None:
    shutil.copytree(source_of(mutant.kind, TEMPLATE), package)
    write_mutant(mutant, package)
    results = check(mutant.kind, package, (mutant.caught_by,))
    # What the suite finds in the process comes after the test.
    failed = [verdict for verdict in results.of("failed") if not verdict.reason.startswith("setup:")]
    assert {verdict.test.split("[")[0] for verdict in failed} == {mutant.caught_by}, results.output
