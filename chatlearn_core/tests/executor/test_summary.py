"""``summary.json``: before and after, and with which versions."""

from __future__ import annotations

from importlib import metadata

from chatlearn_core.executor.summary import before_and_after, versions
from chatlearn_core.plugins.loader import discover_plugins


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
