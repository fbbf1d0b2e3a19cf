"""The record in ``docs/tested-matrix.json`` is one that ``chatlearn plugins matrix`` reads, and leaves nothing out."""

from __future__ import annotations

import re
from pathlib import Path

from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.matrix import compatibility_matrix, read_tested

ROOT = Path(__file__).parent.parent
OURS = frozenset({"fsdp", "transformers", "direct", "checkpoint"})
"""Trainers, generators and weight syncs of this repository."""


def test_every_combination_of_ours_that_is_declared_to_fit_was_tested() -> None:
    rows = compatibility_matrix(discover_plugins(), read_tested(ROOT / "docs/tested-matrix.json"))
    ours = [row for row in rows if {row.trainer, row.generator, row.weight_sync} <= OURS]
    assert {row.weight_sync for row in ours if row.fits} == {"direct", "checkpoint"}
    assert all(row.tested is not None and row.tested.passed for row in ours if row.fits)


def test_the_record_names_tests_that_exist() -> None:
    for result in read_tested(ROOT / "docs/tested-matrix.json").values():
        [file] = re.findall(r"tests/\w+\.py", result.detail)
        assert (ROOT / file).is_file()
