"""What the terminal says of an evaluation."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from chatlearn_cli.progress_bar import ProgressBar, step_numbers
from chatlearn_core.executor.phases import Phase


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


def test_a_long_phase_does_not_look_like_a_hang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a terminal, a line says what the run is doing: before the first step, within it, and seldom later on."""
    monkeypatch.setattr("chatlearn_cli.progress_bar._SILENT_S", 0.1)
    text = io.StringIO()

    def lines_after(number: int) -> list[str]:
        deadline = time.monotonic() + 20
        while len(text.getvalue().splitlines()) < number:
            assert time.monotonic() < deadline, text.getvalue()
            time.sleep(0.01)
        return text.getvalue().splitlines()

    with ProgressBar(console=Console(file=text, width=200)) as bar:
        bar.phases_changed(0, [Phase.STARTING])
        begun = time.monotonic()
        assert all(re.fullmatch(r"starting for \d s", line) for line in lines_after(3)[:3])
        assert time.monotonic() - begun > 0.1 + 0.2 + 0.4, "the time without a line doubles"
        bar.started(tmp_path, 10, 5)
        bar.phases_changed(5, [Phase.GENERATING, Phase.UPDATING])
        before = len(text.getvalue().splitlines())
        assert re.fullmatch(r"generating, updating for \d s, 4 of 10 steps done", lines_after(before + 1)[before])
    assert not bar._speaker.is_alive()


def test_a_terminal_shows_the_start_and_the_time_of_a_long_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chatlearn_cli.progress_bar._BRIEF_S", 0.0)
    text = io.StringIO()
    with ProgressBar(console=Console(file=text, width=80, force_terminal=True)) as bar:
        bar.phases_changed(0, [Phase.RESTORING])
        bar.started(Path("run"), 25, 1)
        bar.step_done(1, {"perf/throughput": 16787.0, "reward": 0.438, "response_length/mean": 18.0})
        bar._progress.refresh()
    assert "starting for 0 s" in text.getvalue()
    assert "restoring for 0 s" in text.getvalue()
