"""``summary.json``: before and after, and with which versions."""

from __future__ import annotations

from importlib import metadata

from chatlearn_core.executor.summary import before_and_after, summary, versions
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.registry import PluginRegistry


def test_before_and_after_hold_what_was_measured_twice() -> None:
    before = {"eval/accuracy": 0.25, "eval/reward": 0.5, "eval/failed": 0.0}
    after = {"eval/accuracy": 0.75, "eval/failed": 1.0, "eval/new": 1.0, "reward": 2.0}
    assert before_and_after(before, after) == {
        "eval/accuracy": {"before": 0.25, "after": 0.75},
        "eval/failed": {"before": 0.0, "after": 1.0},
    }


def test_versions_of_what_took_part() -> None:
    found = versions(discover_plugins())
    assert found["torch"] == metadata.version("torch")
    assert found["chatlearn-core"] == metadata.version("chatlearn-core")
    assert list(found) == sorted(found)


def test_the_summary_is_plain_data() -> None:
    content = summary(
        name="run",
        status="completed",
        steps=3,
        planned_steps=3,
        before={"eval/accuracy": 0.0},
        after={"eval/accuracy": 1.0},
        totals={"samples/total": 24.0},
        best=None,
        model="runs/run/model",
        checkpoint=None,
        wall_s=1.23456,
        error=None,
        registry=PluginRegistry(),
    )
    assert content["eval/accuracy"] == {"before": 0.0, "after": 1.0}
    assert content["totals"] == {"samples/total": 24.0}
    assert content["wall_s"] == 1.235
    assert set(content["versions"]) == {"python", "torch"}
