"""The roster: who takes requests, and that whoever waits hears of a change."""

from __future__ import annotations

import asyncio

import pytest

from chatlearn_core.runtime.roster import Roster


def test_a_replica_is_absent_until_every_reason_is_gone() -> None:
    roster = Roster(3)
    assert roster.accepting == {0, 1, 2}
    with roster.absent([1], "is rebuilt"):
        assert (roster.accepting, roster.is_rebuilding()) == ({0, 2}, True)
        with roster.absent([1, 2], "loads weights"):
            assert roster.accepting == {0}
            assert str(roster) == "replica 1 is rebuilt and loads weights, replica 2 loads weights"
        assert roster.accepting == {0, 2}
    assert (roster.accepting, roster.is_rebuilding(), str(roster)) == ({0, 1, 2}, False, "")
    assert [roster.num_absences(index) for index in range(3)] == [0, 2, 1]


def test_an_error_in_the_block_brings_the_replica_back() -> None:
    roster = Roster(1)
    with pytest.raises(OSError, match="disk"), roster.absent([0], "loads weights"):
        raise OSError("disk")
    assert roster.accepting == {0}


def test_who_takes_requests_is_the_same_object_until_it_changes() -> None:
    roster = Roster(2)
    before = roster.accepting
    assert roster.accepting is before
    with roster.absent([0], "loads weights"):
        assert roster.accepting is not before


async def test_whoever_waits_hears_of_a_coming_and_of_a_going() -> None:
    roster = Roster(1)
    heard: list[str] = []

    async def listen() -> None:
        await roster.changed()
        heard.append("gone")
        await roster.changed()
        heard.append("back")

    task = asyncio.create_task(listen())
    await asyncio.sleep(0)
    with roster.absent([0], "loads weights"):
        for _ in range(3):
            await asyncio.sleep(0)
        assert heard == ["gone"]
    await task
    assert heard == ["gone", "back"]
