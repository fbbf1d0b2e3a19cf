"""A loop that is kept from its turns is told by how long; one that waits is not."""

from __future__ import annotations

import asyncio
import time

from chatlearn_testing.loop_watch import FREE_S, blocks_of, least

BLOCK_S = 0.2


def test_a_sleeping_callback_blocks_the_loop() -> None:
    async def work() -> None:
        await asyncio.sleep(0)
        time.sleep(BLOCK_S)
        await asyncio.sleep(0)

    found = blocks_of(work())
    assert found.longest_s >= BLOCK_S / 2  # at most half of it is taken for a delay of the machine
    assert found.total_s >= found.longest_s - FREE_S


def test_waiting_is_no_block() -> None:
    async def work() -> None:
        await asyncio.sleep(BLOCK_S)

    assert least(lambda: blocks_of(work()).longest_s, BLOCK_S / 4) < BLOCK_S / 4


def test_the_best_measurement_counts() -> None:
    measured = iter([3.0, 0.5, 9.0])
    assert least(lambda: next(measured), 1.0) == 0.5
