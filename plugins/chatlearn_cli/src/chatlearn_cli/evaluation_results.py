"""Results of ``chatlearn eval`` over several models: one file for programs, one for spreadsheets, one picture."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatlearn_cli.evaluation_plot import Panel, Point, plot
from chatlearn_core.exceptions import ChatLearnError

LOW, HIGH = "/low", "/high"
COUNTS = ("samples", "failed", "ungraded")
"""Last parts of metrics that are counts, which the table shows and the picture does not."""


@dataclass(slots=True, frozen=True)
class Evaluated:
    """One model and its metrics."""

    name: str
    """``step N``, or the model's path."""
    step: int | None
    """None for a model directory, whose step is unknown."""
    path: str
    metrics: dict[str, float]


def metric_names(found: Sequence[Evaluated]) -> list[str]:
    """All metrics, without the ends of their intervals; pass@2 comes before pass@16."""
    names = {name for one in found for name in one.metrics}
    ends = {name + end for name in names for end in (LOW, HIGH)}
    return sorted(names - ends, key=lambda name: [part.zfill(12) for part in re.split(r"(\d+)", name)])


def measured(one: Evaluated, name: str) -> tuple[float, float | None, float | None] | None:
    """Value, low and high of a metric; None if the model does not have it."""
    if name not in one.metrics:
        return None
    return one.metrics[name], one.metrics.get(name + LOW), one.metrics.get(name + HIGH)


def as_json(found: Sequence[Evaluated]) -> dict[str, Any]:
    """The content of ``metrics.json``."""
    return {
        "evaluations": [{"name": one.name, "step": one.step, "path": one.path, "metrics": one.metrics} for one in found]
    }


def as_csv(found: Sequence[Evaluated]) -> str:
    """The content of ``metrics.csv``: one line per model and metric."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("name", "step", "path", "metric", "value", "low", "high"))
    for one in found:
        for name in metric_names([one]):
            step = "" if one.step is None else one.step
            writer.writerow((one.name, step, one.path, name, *(measured(one, name) or ())))
    return text.getvalue()


def as_panels(found: Sequence[Evaluated]) -> list[Panel]:
    """One panel per metric that is not a count: checkpoints over their step, model directories by name."""
    panels: list[Panel] = []
    for name in metric_names(found):
        if name.rpartition("/")[2] in COUNTS:
            continue
        points = [
            Point(Path(one.path).name if one.step is None else one.name, one.step, *value)
            for one in found
            if (value := measured(one, name)) is not None
        ]
        panels.append(Panel(name.removeprefix("eval/"), points))
    return panels


def write_results(directory: Path, found: Sequence[Evaluated]) -> list[Path]:
    """Write ``metrics.json``, ``metrics.csv`` and ``metrics.svg``; returns their paths.

    Raises:
        ChatLearnError: the directory cannot be written.
    """
    contents = {
        "metrics.json": json.dumps(as_json(found), indent=2) + "\n",
        "metrics.csv": as_csv(found),
        "metrics.svg": plot(as_panels(found)),
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (directory / name).write_text(content, encoding="utf-8")
    except OSError as error:
        raise ChatLearnError(
            f"cannot write the results to {directory}: {error.strerror or error}. Name another directory with --output"
        ) from error
    return [directory / name for name in contents]
