"""The same run over every transport ends in the same bytes, and ``auto`` says why it chose one."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.engine


def test_transports_give_bit_identical_models(recipe: Any, chatlearn: Any, result_of: Any) -> None:
    results = {}
    for name in ("direct", "checkpoint", "auto"):
        directory = recipe.file.parent / name
        finished = chatlearn("run", recipe.file, f"weight_sync.backend={name}", f"output_dir={directory}")
        assert finished.code == 0, finished.output
        results[name] = result_of(directory)
    assert results["direct"].model == results["checkpoint"].model == results["auto"].model
    assert results["direct"].rollouts == results["checkpoint"].rollouts == results["auto"].rollouts
    mismatch = [line["mismatch/prob_diff_mean"] for line in results["direct"].metrics]
    assert max(mismatch) < 1e-4, "the generator holds the trainer's weights in every step"


def test_a_run_may_change_its_transport_when_it_resumes(recipe: Any, chatlearn: Any, result_of: Any) -> None:
    directory = recipe.file.parent / "undisturbed"
    assert chatlearn("run", recipe.file, f"output_dir={directory}").code == 0
    assert chatlearn("run", recipe.file, "weight_sync.backend=direct", PROBE="saved:2").code == -9
    finished = chatlearn("run", recipe.file, "weight_sync.backend=checkpoint")
    assert finished.code == 0, finished.output
    assert result_of(recipe.run_dir).model == result_of(directory).model


def test_auto_explains_its_choice(recipe: Any, chatlearn: Any) -> None:
    shown = chatlearn("run", recipe.file, "--dry-run")
    assert shown.code == 0, shown.output
    [line] = [line for line in shown.output.splitlines() if "trainer -> generator by " in line]
    assert "by direct: " in line
    assert "fastest" in line
    assert "checkpoint" in line, "and what else would have fitted"
    assert not recipe.run_dir.exists(), "a dry run writes nothing"
