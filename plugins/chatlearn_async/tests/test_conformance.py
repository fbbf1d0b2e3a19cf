"""The suite for rollout modes on every mode, with the settings of `plugins check` and with options that matter."""

from __future__ import annotations

from typing import Any

import pytest

from chatlearn_async import plugin
from chatlearn_async.conformance import SETTINGS
from chatlearn_testing.check import run_conformance

RECORDS = {record.name: record for record in plugin.chatlearn_rollout_modes()}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, dict(SETTINGS.get(f"rollout_mode/{name}", {}))) for name in RECORDS},
    "async-abort": ("async", {"repeatable": False, "options": {"during_sync": "abort"}}),
    "async-pause": ("async", {"repeatable": False, "options": {"during_sync": "pause"}}),
    "async-wait": ("async", {"options": {"during_sync": "wait"}}),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in RECORDS else [pytest.mark.thorough]) for case in CASES]
)
def test_conforms(case: str) -> None:
    name, settings = CASES[case]
    results = run_conformance([RECORDS[name]], settings={f"rollout_mode/{name}": settings})
    assert results.conforms, "\n".join(f"{verdict.test}: {verdict.reason}" for verdict in results.of("failed"))
