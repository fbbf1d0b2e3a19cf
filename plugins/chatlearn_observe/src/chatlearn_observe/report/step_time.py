"""Computes the parts of a step's time from ``timing_s/*``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Place = Literal["stacked", "overlaps", "ahead", "after"]
"""``stacked``: an interval of the step; ``overlaps``: runs during others; ``ahead``: began in earlier steps and ran
during others; ``after``: outside the timed step.
"""

_PREFIX = "timing_s/"
_UPDATE_PARTS = ("forward", "backward", "optimizer")
_WAIT = "wait_for_rollouts"
"""The timer of rollouts that are made ahead: the time that a step waits for them."""
_FIRST = ("generate", _WAIT)
_LAST = ("advantages", *(f"update: {part}" for part in _UPDATE_PARTS), "update: rest", "sync")
REST = "rest"


@dataclass(slots=True, frozen=True)
class StepTimePart:
    """One part of the steps' time."""

    name: str
    place: Place
    seconds: list[float]
    """One value per timed step; 0 if the part did not run."""
    median_s: float
    """Median over the steps in which the part ran."""
    total_s: float
    share: float
    """Fraction of the total of ``step``; with overlapping parts the fractions may add up to more than 1."""


@dataclass(slots=True, frozen=True)
class StepTimes:
    """Times of all timed steps."""

    steps: list[int]
    step_s: list[float]
    """Wall time of each step, without evaluation and checkpoint."""
    parts: list[StepTimePart]
    overlap_s: list[float]
    """Time by which the stacked parts of a step exceed its wall time, because they overlapped."""


def step_times(metrics: Sequence[Mapping[str, Any]]) -> StepTimes | None:
    """Return the times of the steps, in stacking order; None if no step was timed.

    ``update`` is split into forward, backward, optimizer and the rest. ``reward`` runs during generation, so it is not
    stacked. Rollouts made ahead are not stacked either; ``wait_for_rollouts`` is how long the step waited for them.
    ``eval`` is outside ``step``. Time without a timer is ``rest``.
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
    places = {name: _place(name, ahead=_WAIT in columns) for name in columns}
    stacked = _in_order([name for name, place in places.items() if place == "stacked"])
    sums = [sum(columns[name][i] for name in stacked) for i in range(len(timed))]
    columns[REST] = [max(0.0, wall - total) for wall, total in zip(step_s, sums, strict=True)]
    order = [*stacked, REST, *sorted(name for name in columns if name not in {*stacked, REST})]
    return StepTimes(
        steps=[record["step"] for record in timed],
        step_s=step_s,
        parts=[_part(name, places.get(name, "stacked"), columns[name], sum(step_s)) for name in order],
        overlap_s=[max(0.0, total - wall) for wall, total in zip(step_s, sums, strict=True)],
    )


def _place(name: str, *, ahead: bool) -> Place:
    if name == "eval":
        return "after"
    if ahead and name in ("generate", "reward"):
        return "ahead"
    return "overlaps" if name == "reward" else "stacked"


def _part(name: str, place: Place, seconds: list[float], total_step_s: float) -> StepTimePart:
    ran = [value for value in seconds if value > 0]
    return StepTimePart(
        name=name,
        place=place,
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
