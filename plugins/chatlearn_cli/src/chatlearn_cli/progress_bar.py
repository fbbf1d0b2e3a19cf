"""A run's progress on the terminal: one bar, and lines of results above it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from chatlearn_cli.terminal import TolerantStream
from chatlearn_core.executor.phases import Phase
from chatlearn_core.executor.policy import POLICY_METRICS
from chatlearn_core.executor.progress import RunListener
from chatlearn_core.printable import printable

_PLAIN_INTERVAL_S = 10.0
"""Interval of progress lines without a terminal, seconds; the last step always gets one."""


class ProgressBar(RunListener):
    """Shows step, reward, length, tokens/s and the remaining time; without a terminal, prints occasional lines."""

    def __init__(self, *, show: bool = True, counts_tokens: bool = False, console: Console | None = None) -> None:
        self.console = console or Console(file=cast(TextIO, TolerantStream(sys.stderr)), highlight=False)
        self.live = show and self.console.is_terminal
        self._progress = Progress(
            TextColumn("[bold]{task.fields[phase]:<10}"),
            BarColumn(bar_width=None),
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[tokens]}"),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.live,
        )
        self._task: TaskID | None = None
        self._total, self._first = 0, 1
        self._last_line = 0.0
        self.counts_tokens = counts_tokens
        self._num_tokens = 0
        """Tokens sampled since the step began."""

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def started(self, run_dir: Path, total_steps: int, first_step: int) -> None:
        """Show the bar."""
        self._total, self._first = total_steps, first_step
        self.console.print(f"run directory: {printable(str(run_dir))}", markup=False)
        self._task = self._progress.add_task(
            "run", total=total_steps, completed=first_step - 1, phase="starting", tokens="", numbers=""
        )

    def phases_changed(self, step: int, phases: Sequence[Phase]) -> None:
        """Show the phases in progress: ``generating, updating``."""
        if self._task is not None and phases:
            self._progress.update(self._task, phase=", ".join(map(str, phases)))

    def sampled(self, num_tokens: int) -> None:
        """Show the progress of the step's generation."""
        self._num_tokens += num_tokens
        if self._task is None:
            return
        tokens = f"{self._num_tokens:,} tokens"
        self._progress.update(self._task, tokens=tokens)
        now = time.monotonic()
        if not self.live and now - self._last_line >= _PLAIN_INTERVAL_S:
            self._last_line = now
            self.console.print(f"{tokens} so far in this step", markup=False)

    def message(self, text: str) -> None:
        """Print above the bar."""
        self.console.print(printable(text), markup=False, soft_wrap=True)

    def warning(self, text: str) -> None:
        """Print a marked line above the bar."""
        self.console.print(f"[yellow]warning:[/] {_escaped(printable(text))}", soft_wrap=True)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the accuracy or, without it, the mean reward, or the loss of held-out examples."""
        if "eval/accuracy" in metrics:
            measured = f"accuracy {metrics['eval/accuracy']:.1%}"
        elif "eval/reward" in metrics:
            measured = f"mean reward {metrics['eval/reward']:.3f}"
        elif "eval/nll" in metrics:
            measured = f"loss {metrics['eval/nll']:.3f}"
        else:
            measured = "no reward"
        self.console.print(f"step {step}: {measured} on {metrics['eval/samples']:.0f} evaluation samples")

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """Advance the bar."""
        if self._task is None or step == 0:
            return
        numbers = step_numbers(metrics)
        self._num_tokens = 0
        self._progress.update(self._task, completed=step, tokens="", numbers=numbers)
        now = time.monotonic()
        if not self.live and (now - self._last_line >= _PLAIN_INTERVAL_S or step == self._total):
            self._last_line = now
            self.console.print(f"step {step}/{self._total}  {numbers}", markup=False)

    def finished(self, summary: Mapping[str, object]) -> None:
        """Print how the run ended."""
        if summary["status"] == "completed":
            made = f", the last {self._total - self._first + 1} of them" if self._first > 1 else ""
            steps = f"{self._total} step{'' if self._total == 1 else 's'}"
            self.console.print(f"completed {steps}{made} in {summary['wall_s']:.0f} s")
        if summary["model"]:
            self.console.print(f"trained model: {printable(str(summary['model']))}", markup=False)


def step_numbers(metrics: Mapping[str, float]) -> str:
    """The numbers of a step to show."""
    shown = []
    if "reward" in metrics:
        shown.append(f"reward {metrics['reward']:.3f}")
    elif f"{POLICY_METRICS}/loss" in metrics:
        shown.append(f"loss {metrics[f'{POLICY_METRICS}/loss']:.3f}")
    if "response_length/mean" in metrics:
        shown.append(f"length {metrics['response_length/mean']:.1f}")
    shown.append(f"{metrics['perf/throughput']:,.0f} tok/s")
    return "  ".join(shown)


def _escaped(text: str) -> str:
    return text.replace("[", "\\[")
