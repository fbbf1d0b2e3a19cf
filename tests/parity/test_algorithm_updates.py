"""The updates of every algorithm are the same on every trainer: loss, metrics, gradient norm and gradients.

One rank of ``fsdp`` is what others are compared with; its outputs and gradients are compared with plain transformers
by tests of their own.
"""

from __future__ import annotations

from typing import Any

import pytest
from algorithm_updates import LAYOUTS, ONE_RANK, UPDATES, Layout, run

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Algorithm, role and label of a layout -> answers of the ranks."""
    return run(tmp_path_factory.mktemp("algorithms"))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.label)
@pytest.mark.parametrize(("name", "role"), UPDATES)
def test_every_trainer_takes_the_step_of_an_algorithm(answers: Any, name: str, role: str, layout: Layout) -> None:
    [one], ranks = answers[name, role, ONE_RANK.label], answers[name, role, layout.label]
    [norm] = [rank["metrics"]["grad_norm"] for rank in ranks if "grad_norm" in rank["metrics"]]
    assert one["metrics"]["grad_norm"] > 0
    assert norm == pytest.approx(one["metrics"]["grad_norm"], rel=1e-4)
    own = {metric for metric in one["metrics"] if not metric.startswith(("perf/", "timing_s/"))} - {"grad_norm", "lr"}
    assert "loss" in own
    for metric in own:
        total = sum(rank["metrics"].get(metric, 0.0) for rank in ranks)
        assert total == pytest.approx(one["metrics"][metric], rel=1e-4, abs=1e-6), metric
    largest = max(float(gradient.norm()) for gradient in one["gradients"].values())
    for parameter, gradient in one["gradients"].items():
        # A gradient that is much smaller than the largest is below the rounding of the weights it is measured by.
        scale = max(float(gradient.norm()), 1e-2 * largest)
        assert (ranks[0]["gradients"][parameter] - gradient).norm() <= 1e-4 * scale, parameter
