"""The suite for algorithms fails on each mutant of the template's algorithm, in the contract test meant for it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from algorithm_mutants import MUTANTS, AlgorithmMutant

import chatlearn_testing
from chatlearn_core.plugins.records import AlgorithmSpec
from chatlearn_testing.check import run_conformance

pytestmark = pytest.mark.slow
SOURCE = Path(chatlearn_testing.__file__).parent / "template" / "algorithm" / "src" / "acme_plugin"


@pytest.fixture(scope="module")
def template() -> Iterator[AlgorithmSpec]:
    """The template's record."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SOURCE.parent))
        [record] = importlib.import_module("acme_plugin.plugin").chatlearn_algorithms()
        yield record
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_plugin"]:
        del sys.modules[name]


def check(record: AlgorithmSpec, select: list[str] | None = None) -> Any:
    return run_conformance([record], select=select or ())


def test_the_original_passes(template: AlgorithmSpec) -> None:
    results = check(template)
    assert results.conforms, "\n".join(f"{verdict.test}: {verdict.reason}" for verdict in results.of("failed"))
    passed = {verdict.test.partition("[")[0] for verdict in results.of("passed")}
    assert {mutant.caught_by for mutant in MUTANTS} <= passed


@pytest.mark.parametrize(
    "mutant", list({m.caught_by: m for m in reversed(MUTANTS)}.values()), ids=lambda mutant: mutant.name
)  # one for each contract test: `make test-mutants` runs all
def test_a_mutant_is_caught(
    mutant: AlgorithmMutant, template: AlgorithmSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / f"acme_mutant_{mutant.name}"
    package.mkdir()
    for file in SOURCE.glob("*.py"):
        text = file.read_text(encoding="utf-8")
        if file.stem == mutant.file:
            for old, new in ((mutant.old, mutant.new), *mutant.also):
                assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
                text = text.replace(old, new)
        (package / file.name).write_text(text.replace("acme_plugin", package.name), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    changed = replace(template, factory=f"{package.name}.algorithm:Acme", options=f"{package.name}.options:AcmeOptions")
    state = torch.get_rng_state()
    results = check(changed, [mutant.caught_by])
    torch.set_rng_state(state)
    for name in [name for name in sys.modules if name.partition(".")[0] == package.name]:
        del sys.modules[name]
    failed = [verdict for verdict in results.of("failed") if verdict.reason.startswith("call:")]
    assert failed, f"{mutant.name} passes {mutant.caught_by}:\n{results.output}"
    assert {verdict.test.partition("[")[0] for verdict in failed} == {mutant.caught_by}
