"""Where the time of a step went, from ``timing_s/*``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Place = Literal["stacked", "overlaps", "after"]
"""``stacked``: a stretch of the step; ``overlaps``: runs while others do; ``after``: outside the timed step."""

_PREFIX = "timing_s/"
_UPDATE_PARTS = ("forward", "backward", "optimizer")
_FIRST = ("generate",)
_LAST = ("advantages", *(f"update: {part}" for part in _UPDATE_PARTS), "update: rest", "sync")
REST = "rest"


@dataclass(slots=True, frozen=True)
class StepTimePart:
    """One part of the steps' time."""

    name: str
    place: Place
    seconds: list[float]
    """Length: number of timed steps; 0 where the part did not run."""
    median_s: float
    """Over the steps in which it ran."""
    total_s: float
    share: float
    """Of the total of ``step``; parts that overlap others may bring the sum above 1."""


@dataclass(slots=True, frozen=True)
class StepTimes:
    """Times of all steps that have any."""

    steps: list[int]
    step_s: list[float]
    """Wall time of each step, evaluation and checkpoint not included."""
    parts: list[StepTimePart]
    overlap_s: list[float]
    """By how much the stacked parts of a step exceed its wall time: they ran at the same time for that long."""


def step_times(metrics: Sequence[Mapping[str, Any]]) -> StepTimes | None:
    """The times of the steps, in stacking order; None if no step was timed.

    ``update`` is split into forward, backward, optimizer and what remains. ``reward`` runs while generation goes on,
    so it is not stacked. ``eval`` lies outside ``step``. What no timer covers is ``rest``.
    """
    timed = [record for record in metrics if _seconds(record, "step") > 0]
    if not timed:
        return None
    step_s = [_seconds(record, "step") for record in timed]
    names = {name.removeprefix(_PREFIX) for record in timed for name in record if name.startswith(_PREFIX)}
    columns = {name: [_seconds(record, name) for record in timed] for name in names - {"step"}}
    if "update" in columns:
        whole = columns.pop("update")
        split = {part: columns.pop(part) for part in _UPDATE_PARTS if part in columns}
        columns |= {f"update: {part}": column for part, column in split.items()}
        columns["update: rest" if split else "update"] = [
            max(0.0, seconds - sum(column[i] for column in split.values())) for i, seconds in enumerate(whole)
        ]
    stacked = _in_order([name for name in columns if _place(name) == "stacked"])
    sums = [sum(columns[name][i] for name in stacked) for i in range(len(timed))]
    columns[REST] = [max(0.0, wall - total) for wall, total in zip(step_s, sums, strict=True)]
    order = [*stacked, REST, *sorted(name for name in columns if name not in {*stacked, REST})]
    return StepTimes(
        steps=[record["step"] for record in timed],
        step_s=step_s,
        parts=[_part(name, columns[name], sum(step_s)) for name in order],
        overlap_s=[max(0.0, total - wall) for wall, total in zip(step_s, sums, strict=True)],
    )


def _place(name: str) -> Place:
    return {"reward": "overlaps", "eval": "after"}.get(name, "stacked")  # type: ignore[return-value]  # Literal values


def _part(name: str, seconds: list[float], total_step_s: float) -> StepTimePart:
    ran = [value for value in seconds if value > 0]
    return StepTimePart(
        name=name,
        place=_place(name),
        seconds=seconds,
        median_s=statistics.median(ran) if ran else 0.0,
        total_s=sum(seconds),
        share=sum(seconds) / total_step_s,
    )


def _in_order(names: Sequence[str]) -> list[str]:
    first = [name for name in _FIRST if name in names]
    last = [name for name in (*_LAST[:1], "update", *_LAST[1:]) if name in names]
    return [*first, *sorted(set(names) - {*first, *last}), *last]


def _seconds(record: Mapping[str, Any], name: str) -> float:
    value = record.get(_PREFIX + name)
    return float(value) if isinstance(value, int | float) and value > 0 else 0.0
