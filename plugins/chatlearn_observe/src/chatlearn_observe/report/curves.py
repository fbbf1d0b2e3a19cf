"""The metrics of a run as columns, and which of them share a chart."""

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
    """A metric drawn as a band of that width to both sides."""
    low: str | None = None
    high: str | None = None
    """Metrics that bound a band."""
    points: bool = False
    """Measured at some steps only."""


CHARTS = (
    Chart("Reward", ("reward",), "Mean of a step; band: one standard deviation", spread="reward_std"),
    Chart("Held-out accuracy", ("eval/accuracy",), "Share of evaluation samples that are right", points=True),
    Chart("Held-out reward", ("eval/reward",), points=True),
    Chart("KL to the reference", ("actor/kl_loss", "actor/reference_kl", "reward_kl"), "Mean over tokens"),
    Chart("KL of the update", ("actor/ppo_kl",), "From the policy that sampled to the policy being trained"),
    Chart("Entropy", ("actor/entropy",), "Of the policy's next token, nats"),
    Chart(
        "Response length",
        ("response_length/mean",),
        "Tokens; band: shortest to longest",
        low="response_length/min",
        high="response_length/max",
    ),
    Chart("Cut off at the limit", ("response_length/clip_ratio",), "Share of responses"),
    Chart("Clip fraction", ("actor/pg_clipfrac",), "Share of tokens whose ratio was clipped"),
    Chart(
        "Generator-trainer mismatch",
        ("mismatch/prob_diff_mean", "mismatch/kl"),
        "Mean gap of the two probabilities of a sampled token",
    ),
    Chart("Gradient norm", ("actor/grad_norm", "grad_norm"), "Before clipping"),
    Chart("Loss", ("sft/loss", "actor/loss", "loss", "actor/pg_loss")),
    Chart("Learning rate", ("actor/lr", "lr")),
    Chart("Throughput", ("perf/throughput",), "Trained tokens a second"),
    Chart("Excluded samples", ("samples/excluded",), "Left out of training, with a reason"),
    Chart("Groups without spread", ("zero_spread_groups",), "Share of groups whose rewards are all equal"),
    Chart("Staleness", ("staleness/mean", "staleness"), "Policy versions between sampling and training"),
)

_AFTER_ACCURACY = 2
"""Where in ``CHARTS`` those of single evaluation sets belong."""


def metric_columns(metrics: Sequence[Mapping[str, Any]]) -> dict[str, list[float | str | None]]:
    """``{name: one value a record}``: None where a record lacks it, text (``"nan"``) where it is not finite.

    Numbers keep seven significant digits.
    """
    names = sorted({name for record in metrics for name in record if name != "step"})
    return {name: [_value(record.get(name)) for record in metrics] for name in names}


def charts_of(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """The charts that a run has the metrics for; every named evaluation set has an accuracy of its own."""
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
            bands = {key: band for key in ("spread", "low", "high") if (band := getattr(chart, key)) in columns}
            shown.append({"title": chart.title, "metric": found, "note": chart.note, "points": chart.points, **bands})
    return shown


def _has_a_number(column: Sequence[Any]) -> bool:
    return any(value is not None for value in column)


def _value(value: Any) -> float | str | None:
    if value is None or isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str):
        return value
    return float(f"{value:.{_SIGNIFICANT_DIGITS}g}") if math.isfinite(value) else str(value)
