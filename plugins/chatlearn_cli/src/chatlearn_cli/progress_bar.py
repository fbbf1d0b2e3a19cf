"""A run's progress on the terminal: one bar, and lines of results above it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from chatlearn_cli.terminal import TolerantStream
from chatlearn_core.executor.phases import Phase
from chatlearn_core.executor.policy import POLICY_METRICS
from chatlearn_core.executor.progress import RunListener
from chatlearn_core.printable import printable

_PLAIN_INTERVAL_S = 10.0
"""Interval of progress lines without a terminal, seconds; the last step always gets one."""
_SILENT_S, _LONGEST_SILENT_S = 30.0, 600.0
"""Without a terminal: time without a line, seconds, after which one says what the run is doing. It doubles as long as
the phase lasts, up to the second value."""
_BRIEF_S = 10.0
"""On a terminal, the time of a phase is shown from here on, seconds."""


class _PhaseColumn(ProgressColumn):
    """The phases in progress and, if they last, since when."""

    def render(self, task: Task) -> Text:
        spent = time.monotonic() - task.fields["since"]
        shown = task.fields["phase"] if spent < _BRIEF_S else f"{task.fields['phase']} for {_duration(spent)}"
        return Text(f"{shown:<10}", style="bold")


class ProgressBar(RunListener):
    """Shows phase, step, reward, length, tokens/s and the remaining time; without a terminal, prints occasional lines.

    A run that takes long to start, or over one step, says what it is doing and for how long.
    """

    def __init__(self, *, show: bool = True, counts_tokens: bool = False, console: Console | None = None) -> None:
        self.console = console or Console(file=cast(TextIO, TolerantStream(sys.stderr)), highlight=False)
        self.live = show and self.console.is_terminal
        self._progress = Progress(
            _PhaseColumn(table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[step]}"),
            TextColumn("{task.fields[tokens]}"),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.live,
        )
        self._since = self._last_line = time.monotonic()
        """When the present phases began, and when a line was printed."""
        self._phase = str(Phase.STARTING)
        self._silent_s = _SILENT_S
        self._task = self._progress.add_task(
            "run", total=None, phase=self._phase, since=self._since, step="", tokens="", numbers=""
        )
        self._total, self._first, self._step = 0, 1, 0
        self.counts_tokens = counts_tokens
        self._num_tokens = 0
        """Tokens sampled since the step began."""
        self._ended = threading.Event()
        self._speaker = threading.Thread(target=self._speak, name="progress", daemon=True)

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        self._since = self._last_line = time.monotonic()
        if not self.live:
            self._speaker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if not self.live:
            self._speaker.join()
        self._progress.stop()

    def started(self, run_dir: Path, total_steps: int, first_step: int) -> None:
        """Show the steps."""
        self._total, self._first, self._step = total_steps, first_step, first_step - 1
        self._say(f"run directory: {printable(str(run_dir))}")
        self._progress.update(
            self._task, total=total_steps, completed=first_step - 1, step=f"step {first_step - 1}/{total_steps}"
        )

    def phases_changed(self, step: int, phases: Sequence[Phase]) -> None:
        """Show the phases in progress: ``generating, updating``."""
        if phases:
            self._phase, self._since, self._silent_s = ", ".join(map(str, phases)), time.monotonic(), _SILENT_S
            self._progress.update(self._task, phase=self._phase, since=self._since)

    def sampled(self, num_tokens: int) -> None:
        """Show the progress of the step's generation."""
        self._num_tokens += num_tokens
        tokens = f"{self._num_tokens:,} tokens"
        self._progress.update(self._task, tokens=tokens)
        if self._total and not self.live and time.monotonic() - self._last_line >= _PLAIN_INTERVAL_S:
            self._say(f"{tokens} so far in this step")

    def _speak(self) -> None:
        """Print a line whenever there was none for a while."""
        while not self._ended.wait(min(1.0, self._silent_s)):
            now = time.monotonic()
            if now - max(self._last_line, self._since) < self._silent_s:
                continue
            self._silent_s = min(2 * self._silent_s, _LONGEST_SILENT_S)
            done = f", {self._step} of {self._total} steps done" if self._total else ""
            self._say(f"{self._phase} for {_duration(now - self._since)}{done}")

    def _say(self, text: str) -> None:
        self._last_line = time.monotonic()
        self.console.print(text, markup=False)

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
        if step == 0:
            return
        numbers = step_numbers(metrics)
        self._num_tokens, self._step = 0, step
        shown = f"step {step}/{self._total}"
        self._progress.update(self._task, completed=step, step=shown, tokens="", numbers=numbers)
        if not self.live and (time.monotonic() - self._last_line >= _PLAIN_INTERVAL_S or step == self._total):
            self._say(f"{shown}  {numbers}")

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


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _escaped(text: str) -> str:
    return text.replace("[", "\\[")
