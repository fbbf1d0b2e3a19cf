"""Converts a run's metrics to columns, and selects the charts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SIGNIFICANT_DIGITS = 7


@dataclass(slots=True, frozen=True)
class Chart:
    """One chart: the first of ``names`` that a run has, drawn as a line or as points."""

    title: str
    names: tuple[str, ...]
    note: str = ""
    spread: str | None = None
    """Metric whose value is the half-width of a band, limited by ``low`` and ``high``."""
    low: str | None = None
    high: str | None = None
    """Metrics that bound the band: directly, or as limits of ``spread``."""
    points: bool = False
    """Whether the metric is measured only at some steps."""


CHARTS = (
    Chart(
        "Reward",
        ("reward",),
        "Mean of a step; band: one standard deviation, within the step's lowest and highest reward",
        spread="reward_std",
        low="reward_min",
        high="reward_max",
    ),
    Chart("Held-out accuracy", ("eval/accuracy",), "Share of correct evaluation samples", points=True),
    Chart("Held-out reward", ("eval/reward",), points=True),
    Chart("KL to the reference", ("policy/reference_kl", "policy/kl_loss", "reward_kl"), "Mean over tokens"),
    Chart("KL of the update", ("policy/ppo_kl",), "From the policy that sampled to the policy being trained"),
    Chart("Entropy", ("policy/entropy",), "Entropy of the policy's next token, nats"),
    Chart(
        "Response length",
        ("response_length/mean",),
        "Tokens; band: shortest to longest",
        low="response_length/min",
        high="response_length/max",
    ),
    Chart("Cut off at the limit", ("response_length/clip_ratio",), "Share of responses"),
    Chart("Clip fraction", ("policy/pg_clipfrac",), "Share of tokens whose ratio was clipped"),
    Chart(
        "Generator-trainer mismatch",
        ("mismatch/prob_diff_mean", "mismatch/kl"),
        "Mean difference of the two probabilities of a sampled token",
    ),
    Chart("Gradient norm", ("policy/grad_norm", "grad_norm"), "Before clipping"),
    Chart("Loss", ("policy/loss", "loss", "policy/pg_loss")),
    Chart("Learning rate", ("policy/lr", "lr")),
    Chart("Throughput", ("perf/throughput",), "Trained tokens per second"),
    Chart("Excluded samples", ("samples/excluded",), "Samples excluded from training, with a reason"),
    Chart("Groups without spread", ("zero_spread_groups",), "Share of groups whose rewards are all equal"),
    Chart("Staleness", ("rollout/staleness_mean",), "Policy versions between sampling and training, mean over tokens"),
    Chart("Trainer waits", ("perf/updater_idle",), "Fraction of the time in which the trainer waited for rollouts"),
    Chart("Generators idle", ("perf/generator_idle",), "Fraction of the time without an open request"),
)

_AFTER_ACCURACY = 2
"""Index in ``CHARTS`` at which the charts of single evaluation sets are inserted."""


def metric_columns(metrics: Sequence[Mapping[str, Any]]) -> dict[str, list[float | str | None]]:
    """Return ``{name: one value per record}``: None if a record lacks the metric, text (``"nan"``) if it is not finite.

    Numbers keep seven significant digits.
    """
    names = sorted({name for record in metrics for name in record if name != "step"})
    return {name: [_value(record.get(name)) for record in metrics] for name in names}


def charts_of(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return the charts for which the run has metrics; every named evaluation set gets its own accuracy chart."""
    charts = [*CHARTS[:_AFTER_ACCURACY]]
    for name in sorted(columns):
        if name.startswith("eval/") and name.endswith("/accuracy") and name != "eval/accuracy":
            dataset = name.removeprefix("eval/").removesuffix("/accuracy")
            charts.append(Chart(f"Held-out accuracy: {dataset}", (name,), points=True))
    charts += CHARTS[_AFTER_ACCURACY:]
    shown = []
    for chart in charts:
        found = next((name for name in chart.names if _has_a_number(columns.get(name, ()))), None)
        if found is not None:
            band = _band(chart, columns, found)
            shown.append({"title": chart.title, "metric": found, "note": chart.note, "points": chart.points, **band})
    return shown


def _band(chart: Chart, columns: Mapping[str, Sequence[Any]], metric: str) -> dict[str, list[float | None]]:
    """Return ``low`` and ``high`` of the band, one value per record; empty if the run has no metrics for it."""
    spread, lowest, highest = (
        None if name is None else columns.get(name) for name in (chart.spread, chart.low, chart.high)
    )
    if spread is None and (chart.spread is not None or lowest is None or highest is None):
        return {}
    band: dict[str, list[float | None]] = {"low": [], "high": []}
    for i, value in enumerate(columns[metric]):
        for key, sign, bounds, nearer in (("low", -1, lowest, max), ("high", 1, highest, min)):
            bound = _finite(bounds, i)
            edge = bound if spread is None else None
            if spread is not None and isinstance(value, int | float):
                edge = value + sign * (_finite(spread, i) or 0.0)
                edge = edge if bound is None else nearer(edge, bound)
            band[key].append(edge)
    return band


def _finite(column: Sequence[Any] | None, i: int) -> float | None:
    value = None if column is None else column[i]
    return value if isinstance(value, int | float) else None


def _has_a_number(column: Sequence[Any]) -> bool:
    return any(value is not None for value in column)


def _value(value: Any) -> float | str | None:
    if value is None or isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str):
        return value
    return float(f"{value:.{_SIGNIFICANT_DIGITS}g}") if math.isfinite(value) else str(value)
