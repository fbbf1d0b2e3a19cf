"""Converts ``timeline.jsonl`` and the staleness metrics of asynchronous runs for display."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST_STEPS = 200
"""Steps of a longer run that the time line shows: half of them its first, half its last."""
MOST_REPLICAS = 32
"""Replicas of a larger role that it shows: the first."""
_TRAINER = ("updating", "waiting", "syncing")
_STALENESS = re.compile(r"rollout/staleness/(\d+)")

Intervals = list[list[float]]
"""Start and stop, seconds."""


@dataclass(slots=True, frozen=True)
class LaneShares:
    """How a lane spent its time."""

    name: str
    shares: dict[str, float]
    """Activity -> fraction of the time."""


@dataclass(slots=True, frozen=True)
class ShownTimeline:
    """Who worked when."""

    lines: list[dict[str, Any]]
    """Per step: ``step``, ``start`` and ``stop`` in seconds since the first shown step began, without the time between
    a stop of the run and its resume; the trainer's intervals by activity; ``lanes``, the intervals of each replica."""
    lanes: list[str]
    """Names of the replicas."""
    trainer: LaneShares
    generators: list[LaneShares]
    """One per role: means over all of its replicas, shown or not."""
    left_out: str
    """What the picture does not show; empty if it shows everything."""
    from_step: int
    """The shares count from this step on: the first one only fills the buffer."""


@dataclass(slots=True, frozen=True)
class Staleness:
    """Distribution of staleness."""

    ages: list[int]
    """Policy versions between sampling and training."""
    shares: list[float]
    """Per age: fraction of sampled tokens, mean over steps."""
    mean: float
    """Versions."""
    dropped: float
    """Fraction of groups that were too old; mean over steps."""


def shown_timeline(records: Sequence[Mapping[str, Any]], notes: list[str]) -> ShownTimeline | None:
    """Return the time line; None without a readable line. A line that is none is reported in ``notes``."""
    by_step: dict[int, Mapping[str, Any]] = {}
    for record in records:
        if _is_line(record):
            by_step[record["step"]] = record  # a step that was made again
        else:
            notes.append(f"timeline.jsonl: a line is not as chatlearn-async writes it, and is left out: {record!r:.80}")
    if not by_step:
        return None
    ordered = [by_step[step] for step in sorted(by_step)]
    counted = ordered[1:] or ordered
    half = MOST_STEPS // 2
    shown = ordered if len(ordered) <= MOST_STEPS else [*ordered[:half], *ordered[-half:]]
    sizes = {role: max(len(line["generators"].get(role, ())) for line in ordered) for role in _roles(ordered)}
    left_out = []
    if len(shown) < len(ordered):
        left_out.append(f"steps {shown[half - 1]['step'] + 1} to {shown[half]['step'] - 1}")
    left_out += [
        f"replicas {MOST_REPLICAS} to {size - 1} of {role}" for role, size in sizes.items() if size > MOST_REPLICAS
    ]
    lanes = [(role, index) for role, size in sizes.items() for index in range(min(size, MOST_REPLICAS))]
    return ShownTimeline(
        lines=_placed(shown, lanes),
        lanes=[f"{role} {index}" for role, index in lanes],
        trainer=_trainer_shares(counted),
        generators=[_generator_shares(role, size, counted) for role, size in sizes.items()],
        left_out=" and ".join(left_out),
        from_step=counted[0]["step"],
    )


def staleness_of(metrics: Sequence[Mapping[str, Any]]) -> Staleness | None:
    """Return the distribution over the steps that have one; None if none has."""
    found = [
        {int(match[1]): float(value) for name, value in record.items() if (match := _age(name)) and _is_number(value)}
        for record in metrics
    ]
    steps = [shares for shares in found if shares]
    if not steps:
        return None
    ages = list(range(max(age for shares in steps for age in shares) + 1))
    shares = [sum(of_step.get(age, 0.0) for of_step in steps) / len(steps) for age in ages]
    dropped = [record["rollout/dropped_stale"] for record in metrics if _is_number(record.get("rollout/dropped_stale"))]
    return Staleness(
        ages=ages,
        shares=shares,
        mean=sum(age * share for age, share in zip(ages, shares, strict=True)),
        dropped=sum(dropped) / len(dropped) if dropped else 0.0,
    )


def _placed(lines: Sequence[Mapping[str, Any]], lanes: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    placed, start = [], 0.0
    for line in lines:

        def at(intervals: Intervals, start: float = start) -> Intervals:
            return [[round(start + a, 4), round(start + b, 4)] for a, b in intervals]

        generators = line["generators"]
        placed.append(
            {
                "step": line["step"],
                "start": round(start, 4),
                "stop": round(start + line["seconds"], 4),
                **{name: at(line[name]) for name in _TRAINER},
                "lanes": [
                    at(generators[role][index]) if index < len(generators.get(role, ())) else []
                    for role, index in lanes
                ],
            }
        )
        start += line["seconds"]
    return placed


def _trainer_shares(lines: Sequence[Mapping[str, Any]]) -> LaneShares:
    total = sum(line["seconds"] for line in lines)
    seconds = {name: sum(_length(line[name]) for line in lines) for name in _TRAINER}
    shares = {name: value / total for name, value in seconds.items()}
    return LaneShares("trainer", shares | {"other": max(0.0, 1.0 - sum(shares.values()))})


def _generator_shares(role: str, size: int, lines: Sequence[Mapping[str, Any]]) -> LaneShares:
    total = size * sum(line["seconds"] for line in lines)
    busy = sum(_length(replica) for line in lines for replica in line["generators"].get(role, ()))
    return LaneShares(role, {"sampling": busy / total, "idle": max(0.0, 1.0 - busy / total)})


def _roles(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted({role for line in lines for role, replicas in line["generators"].items() if replicas})


def _length(intervals: Intervals) -> float:
    return sum(stop - start for start, stop in intervals)


def _is_line(record: Mapping[str, Any]) -> bool:
    generators, step = record.get("generators"), record.get("step")
    return (
        isinstance(step, int)
        and _is_number(record.get("seconds"))
        and record["seconds"] > 0
        and all(_are_intervals(record.get(name)) for name in _TRAINER)
        and isinstance(generators, dict)
        and all(isinstance(one, list) and all(map(_are_intervals, one)) for one in generators.values())
    )


def _are_intervals(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, list) and len(one) == 2 and all(map(_is_number, one)) and one[0] <= one[1] for one in value
    )


def _age(name: str) -> re.Match[str] | None:
    return _STALENESS.fullmatch(name)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
