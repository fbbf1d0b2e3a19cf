"""The head of a report: the run's identity, progress and events."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chatlearn_core.metrics.run_directory import FAILURE_PAGE
from chatlearn_observe.report.run_files import RunFiles

_STATUS = {
    "completed": ("complete", "Complete"),
    "complete": ("complete", "Complete"),
    "failed": ("failed", "Failed"),
    "interrupted": ("open", "Interrupted"),
}
"""``status`` in ``summary.json`` -> (style, label)."""
_MOST_EVENTS = 500


@dataclass(slots=True, frozen=True)
class Overview:
    """Facts to show."""

    name: str
    status: str
    """``complete``, ``failed`` or ``open``."""
    status_label: str
    error: str | None
    facts: list[tuple[str, str]]
    """(label, value), the most important first."""
    measure: str
    """Name of the measure in ``before`` and ``after``: accuracy, or mean reward if rewards give no accuracy."""
    before: str | None
    """Value on held-out data before training; None if it was not measured."""
    after: str | None
    gained: str | None
    """Difference with sign; for an accuracy in percentage points."""
    versions: list[tuple[str, str]]


@dataclass(slots=True, frozen=True)
class ShownEvent:
    """One line of ``events.jsonl``."""

    kind: str
    step: str
    text: str
    time: str = ""
    """UTC, in seconds."""


def overview_of(files: RunFiles) -> Overview:
    """Return the content of the page's head. A run without ``summary.json`` is running, or was killed."""
    summary, config = files.summary, files.config
    steps = files.metrics[-1]["step"] if files.metrics else 0
    train = config.get("train") if isinstance(config.get("train"), dict) else {}
    assert isinstance(train, dict)
    planned = summary.get("planned_steps") or train.get("steps")
    told = summary.get("status")
    status, label = _STATUS.get(str(told), ("open", str(told) if told else "Running, or killed"))
    measure, show, gain = "accuracy", _percent, "{:+.1f} points"
    before, after = _before_and_after(files, "eval/accuracy")
    gained = None if before is None or after is None else 100 * (after - before)
    if before is None and after is None:
        measure, show, gain = "mean reward", _plain, "{:+.3g}"
        before, after = _before_and_after(files, "eval/reward")
        gained = None if before is None or after is None else after - before
    return Overview(
        name=str(summary.get("name") or config.get("name") or files.path.name),
        status=status,
        status_label=label,
        error=str(summary["error"]) if summary.get("error") else None,
        facts=_facts(files, steps, planned),
        measure=measure,
        before=show(before),
        after=show(after),
        gained=None if gained is None else gain.format(gained),
        versions=[(str(name), str(version)) for name, version in _mapping(summary.get("versions")).items()],
    )


def shown_events(files: RunFiles) -> list[ShownEvent]:
    """Return the newest events, oldest first; a first line says how many are left out."""
    events = [_event(record) for record in files.events]
    if len(events) <= _MOST_EVENTS:
        return events
    note = ShownEvent("note", "", f"{len(events) - _MOST_EVENTS} earlier events are in {files.path / 'events.jsonl'}")
    return [note, *events[-_MOST_EVENTS:]]


def duration(seconds: float) -> str:
    """Format a duration: ``3 h 07 min``, ``4 min 12 s``, ``8.3 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def short_duration(seconds: float) -> str:
    """Format a duration precisely enough for parts of a step: ``41.2 ms``, ``1.25 s``."""
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s" if seconds < 60 else duration(seconds)


def _facts(files: RunFiles, steps: int, planned: Any) -> list[tuple[str, str]]:
    summary, config = files.summary, files.config
    model = _mapping(config.get("model")).get("path")
    algorithm = _mapping(config.get("algorithm")).get("name")
    totals = _mapping(summary.get("totals"))
    best = _mapping(summary.get("best"))
    facts = [("Steps", f"{steps} of {planned}" if planned else str(steps)), ("Wall time", _wall_time(files))]
    if algorithm:
        facts.append(("Algorithm", str(algorithm)))
    if _is_number(totals.get("samples/total")):
        excluded = _number(totals.get("samples/excluded"))
        facts.append(("Samples", f"{totals['samples/total']:,.0f}, excluded {excluded:,.0f}"))
    if _is_number(totals.get("perf/trained_tokens")):
        facts.append(("Trained tokens", f"{totals['perf/trained_tokens']:,.0f}"))
    if "step" in best:
        facts.append(("Best checkpoint", f"step {best['step']}"))
    if model:
        facts.append(("Started from", str(model)))
    if summary.get("model"):
        facts.append(("Trained model", str(summary["model"])))
    facts.append(("Run directory", str(files.path)))
    if summary.get("status") == "failed" and (files.path / FAILURE_PAGE).exists():
        facts.append(("What happened, and how to continue", str(files.path / FAILURE_PAGE)))
    return facts


def _wall_time(files: RunFiles) -> str:
    wall = files.summary.get("wall_s")
    wall = wall if _is_number(wall) else None
    resumed = any(record.get("event") == "resume" for record in files.events)
    if isinstance(wall, int | float) and not resumed:
        return duration(wall)
    timed = sum(_number(record.get(name)) for record in files.metrics for name in ("timing_s/step", "timing_s/eval"))
    last = f", {duration(wall)} since it was last resumed" if isinstance(wall, int | float) else " so far"
    return f"{duration(timed)} in steps{last}"


def _before_and_after(files: RunFiles, metric: str) -> tuple[float | None, float | None]:
    """Return both values from the summary, or from the first and last evaluation so far."""
    told = _mapping(files.summary.get(metric))
    measured = [(r["step"], r[metric]) for r in files.metrics if _is_number(r.get(metric))]
    before = told.get("before", measured[0][1] if measured and measured[0][0] == 0 else None)
    after = told.get("after", measured[-1][1] if measured and measured[-1][0] > 0 else None)
    return (before if _is_number(before) else None, after if _is_number(after) else None)


def _event(record: Mapping[str, Any]) -> ShownEvent:
    facts = {name: value for name, value in record.items() if name not in ("event", "step", "time")}
    if "text" in facts:  # the text already contains the others
        facts = {"text": facts["text"]}
    texts = facts.values() if len(facts) == 1 else (f"{name}: {value}" for name, value in facts.items())
    step = record.get("step")
    return ShownEvent(
        str(record.get("event", "note")),
        "" if step is None else str(step),
        "\n".join(map(str, texts)),
        str(record.get("time", "")).removesuffix("+00:00").replace("T", " "),
    )


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.1f}%"


def _plain(value: float | None) -> str | None:
    return None if value is None else f"{value:.3g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _number(value: Any) -> float:
    return float(value) if _is_number(value) else 0.0


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
