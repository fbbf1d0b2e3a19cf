from __future__ import annotations

import gc

from chatlearn_cli.garbage import ALLOCATIONS, garbage_collected_seldom


def test_the_collector_is_as_before_when_a_run_is_over() -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    with garbage_collected_seldom():
        assert gc.get_threshold()[0] == ALLOCATIONS
        assert gc.get_freeze_count() > before[1]
    assert (gc.get_threshold(), gc.get_freeze_count()) == before
