"""The line of a step: reduced numbers by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from chatlearn_core.executor.metrics_line import epochs, throughput, values
from chatlearn_core.types import Metric


def test_values_are_reduced_and_sorted() -> None:
    metrics = {"b": Metric(6.0, 4.0), "a": Metric(5.0, reducer="sum")}
    assert list(values(metrics).items()) == [("a", 5.0), ("b", 1.5)]


def test_throughput_is_tokens_over_the_time_of_the_step() -> None:
    def line(seconds: float) -> dict[str, float]:
        metrics = {
            "timing_s/step": Metric(seconds, reducer="sum"),
            "perf/trained_tokens": Metric(300.0, reducer="sum"),
        }
        return throughput(metrics)

    assert line(2.0) == {"perf/throughput": 150.0}
    assert line(0.0) == {"perf/throughput": 0.0}


def test_epochs_are_named_where_there_are_several_datasets() -> None:
    one: Any = SimpleNamespace(epochs={"sums": 1.5})
    two: Any = SimpleNamespace(epochs={"sums": 1.5, "words": 0.25})
    assert epochs(one) == {"training/epoch": 1.5}
    assert epochs(two) == {"training/epoch/sums": 1.5, "training/epoch/words": 0.25}
