"""Writes the report of a run directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatlearn_core.exceptions import ChatLearnError
from chatlearn_observe.report.curves import charts_of, metric_columns
from chatlearn_observe.report.overview import overview_of, shown_events
from chatlearn_observe.report.page import render_page
from chatlearn_observe.report.rollouts import RolloutData, collect_rollouts
from chatlearn_observe.report.run_files import RunFiles, read_run
from chatlearn_observe.report.step_time import StepTimes, step_times
from chatlearn_observe.report.timeline import shown_timeline, staleness_of
from chatlearn_observe.report.tokens import find_decoder

DEFAULT_MAX_ROLLOUTS = 1000


@dataclass(slots=True, frozen=True)
class ReportSettings:
    """Settings of a report."""

    max_rollouts: int = DEFAULT_MAX_ROLLOUTS
    tokenizer: str | None = None
    """Model directory whose tokenizer decodes tokens; None: the run's own."""
    token_text: bool = True
    """False: tokens are shown as ids, and no tokenizer is loaded."""


@dataclass(slots=True, frozen=True)
class WrittenReport:
    """Facts about a written report."""

    path: Path
    num_steps: int
    num_rollouts: int
    notes: tuple[str, ...]
    """Problems with reading or showing data."""


def write_report(run_dir: Path, output: Path | None = None, settings: ReportSettings | None = None) -> WrittenReport:
    """Write the report of a run in any state.

    Args:
        run_dir: the run's directory.
        output: file to write; ``run_dir / "report.html"`` by default.
        settings: settings of the report; None for the defaults.

    Raises:
        ChatLearnError: ``run_dir`` belongs to no run, or the file cannot be written; names the path.
    """
    files = read_run(run_dir)
    page, rollouts = build_report(files, settings or ReportSettings())
    path = output or run_dir / "report.html"
    try:
        # JSON may contain a lone surrogate, which UTF-8 cannot encode: write its JSON escape.
        path.write_bytes(page.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise ChatLearnError(
            f"cannot write the report {path}: {error.strerror or error}. Choose another file with --output"
        ) from error
    steps = files.metrics[-1]["step"] if files.metrics else 0
    return WrittenReport(path, steps, len(rollouts.samples), tuple(files.notes))


def build_report(files: RunFiles, settings: ReportSettings) -> tuple[str, RolloutData]:
    """Return the page and its rollouts."""
    decode, origin = None, "token ids were requested"
    if settings.token_text and files.rollout_files and settings.max_rollouts:
        decode, origin = find_decoder(files.path, files.config, settings.tokenizer)
        if decode is None:
            files.notes.append(f"tokens are shown as ids, because no tokenizer could be loaded: {origin}")
    rollouts = collect_rollouts(files.rollout_files, settings.max_rollouts, decode, files.notes)
    columns = metric_columns(files.metrics)
    times = step_times(files.metrics)
    timeline, staleness = shown_timeline(files.timeline, files.notes), staleness_of(files.metrics)
    data = {
        "steps": [record["step"] for record in files.metrics],
        "metrics": columns,
        "charts": charts_of(columns),
        "times": _times_data(times),
        "timeline": None if timeline is None else {"lines": timeline.lines, "lanes": timeline.lanes},
        "staleness": None if staleness is None else {"ages": staleness.ages, "shares": staleness.shares},
        "rollouts": {"groups": rollouts.groups, "samples": rollouts.samples, "pieces": rollouts.pieces},
    }
    page = render_page(
        data=data,
        overview=overview_of(files),
        events=shown_events(files),
        times=times,
        timeline=timeline,
        staleness=staleness,
        left_out=rollouts.left_out,
        num_rollouts=len(rollouts.samples),
        token_origin=origin if decode is not None else None,
        flow_svg=files.flow_svg,
        config_text=files.config_text,
        notes=files.notes,
    )
    return page, rollouts


def _times_data(times: StepTimes | None) -> dict[str, Any] | None:
    if times is None:
        return None
    return {
        "steps": times.steps,
        "step_s": _rounded(times.step_s),
        "overlap_s": _rounded(times.overlap_s),
        "parts": [{"name": p.name, "place": p.place, "seconds": _rounded(p.seconds)} for p in times.parts],
    }


def _rounded(seconds: list[float]) -> list[float]:
    return [round(value, 6) for value in seconds]
