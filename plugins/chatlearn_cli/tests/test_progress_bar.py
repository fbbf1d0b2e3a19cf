"""What the terminal says of an evaluation."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from chatlearn_cli.progress_bar import ProgressBar, step_numbers


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"eval/accuracy": 0.403, "eval/reward": 0.5}, "step 0: accuracy 40.3% on 300 evaluation samples"),
        ({"eval/reward": 0.979}, "step 0: mean reward 0.979 on 300 evaluation samples"),
        ({"eval/nll": 1.25}, "step 0: loss 1.250 on 300 evaluation samples"),
        ({"eval/failed": 300.0}, "step 0: no reward on 300 evaluation samples"),
    ],
)
def test_only_an_accuracy_is_called_one(metrics: dict[str, float], said: str) -> None:
    text = io.StringIO()
    ProgressBar(console=Console(file=text, width=200)).evaluated(0, {"eval/samples": 300.0, **metrics})
    assert text.getvalue().strip() == said


def test_a_step_shows_its_reward_or_its_loss() -> None:
    metrics = {"policy/loss": 0.5, "perf/throughput": 1200.0}
    assert step_numbers(metrics) == "loss 0.500  1,200 tok/s"
    assert step_numbers({**metrics, "reward": 0.25}) == "reward 0.250  1,200 tok/s"


def test_tokens_of_a_step_are_counted_as_they_come(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("chatlearn_cli.progress_bar._PLAIN_INTERVAL_S", 0.0)
    text = io.StringIO()
    bar = ProgressBar(counts_tokens=True, console=Console(file=text, width=200))
    assert bar.counts_tokens
    bar.sampled(5)  # before the bar is there
    bar.started(tmp_path, 2, 1)
    bar.sampled(1000)
    bar.step_done(1, {"perf/throughput": 10.0})
    bar.sampled(7)
    lines = text.getvalue().splitlines()
    assert "1,005 tokens so far in this step" in lines
    assert lines[-1] == "7 tokens so far in this step"
    assert not ProgressBar().counts_tokens
