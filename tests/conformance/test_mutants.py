"""The kit fails on each deliberate mutant, in the contract test meant for it, and passes the original backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine_mutants
import pytest
import template_mutants
from conformance_mutants import MUTANTS, Mutant
from mutant_groups import GROUPS

from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_hf.tiny import build_tiny_model
from chatlearn_testing.check import SUITES, run_conformance
from chatlearn_testing.suites import RewardCase

PLAIN = "chatlearn_hf.plain_forward:load_plain_model"
USERS_CODE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "raise":
        raise RuntimeError("broken on purpose")
    return float(solution_str == ground_truth)
"""
CASES = (RewardCase("yes", 1.0, ground_truth="yes"), RewardCase("raise", None), RewardCase("no", 0.0, ground_truth="y"))

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("models") / "qwen3"
    # Weights large enough that greedy text does not repeat, and one layer, to be quick.
    return build_tiny_model(target, "qwen3", hidden=32, layers=1, max_length=128, initializer_range=0.2)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What a subclass would set, by kind."""
    file = tmp_path_factory.mktemp("user") / "rewards.py"
    file.write_text(USERS_CODE)
    reward = {"cases": CASES, "options": {"path": f"{file}:compute_score", "num_workers": 1, "timeout_s": 20.0}}
    return {"reward": reward}


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, id=f"{mutant.kind}-{mutant.code}", marks=[pytest.mark.thorough] if index % 3 else [])
        for index, mutant in enumerate(MUTANTS)
    ],
)
def test_a_mutant_is_caught(
    mutant: Mutant, chatlearn_registry: PluginRegistry, model_directory: Path, settings: dict[str, dict[str, Any]]
) -> None:
    record = mutant.record(chatlearn_registry.select(mutant.kind, mutant.base))
    results = run_conformance(
        [record],
        model_directory=model_directory,
        load_reference=PLAIN,
        settings={f"{record.kind}/{record.name}": settings.get(record.kind, {}) | mutant.settings},
        select=[mutant.caught_by],
    )
    failed = results.of("failed")
    assert failed, f"{mutant.code} passes {mutant.caught_by}:\n{results.output}"
    assert {verdict.test.split("[")[0] for verdict in failed} == {mutant.caught_by}
    assert all(verdict.reason.startswith("call:") for verdict in failed), failed


@pytest.mark.parametrize(
    ("kind", "name", "export"),
    sorted({(mutant.kind, mutant.base, mutant.export or "") for mutant in MUTANTS}),
    ids=lambda part: part or "-",
)
def test_the_original_passes(
    kind: str,
    name: str,
    export: str,
    chatlearn_registry: PluginRegistry,
    model_directory: Path,
    settings: dict[str, dict[str, Any]],
) -> None:
    record = chatlearn_registry.select(kind, name)
    results = run_conformance(
        [record],
        model_directory=model_directory,
        load_reference=PLAIN,
        settings={f"{kind}/{name}": settings.get(kind, {}) | ({"export": export} if export else {})},
    )
    assert results.conforms, "\n".join(f"{v.test}: {v.reason}" for v in results.of("failed"))
    of_this = [mutant for mutant in MUTANTS if (mutant.kind, mutant.base, mutant.export or "") == (kind, name, export)]
    caught = {mutant.caught_by for mutant in of_this}
    passed = {verdict.test.split("[")[0] for verdict in results.of("passed")}
    assert caught <= passed, f"skipped for the original: {caught - passed}"


def test_every_suite_has_mutants() -> None:
    kinds = {mutant.kind for mutant in (*MUTANTS, *template_mutants.MUTANTS)}
    assert kinds == {*SUITES, "reader"}, "readers are datasets with a suite of their own"
    named = {mutant.caught_by for mutant in (*template_mutants.MUTANTS, *engine_mutants.MUTANTS)}
    assert named <= GROUPS.keys(), "the table of `make test-mutants` has a class for each"
