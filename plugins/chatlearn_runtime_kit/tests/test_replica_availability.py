"""The availability of replicas: which take requests, and that waiting calls notice a change."""

from __future__ import annotations

import asyncio

import pytest

from chatlearn_runtime_kit.replica_availability import ReplicaAvailability


def test_a_replica_is_absent_until_every_reason_is_gone() -> None:
    availability = ReplicaAvailability(3)
    assert availability.accepting == {0, 1, 2}
    with availability.absent([1], "is rebuilt"):
        assert (availability.accepting, availability.is_rebuilding()) == ({0, 2}, True)
        with availability.absent([1, 2], "loads weights"):
            assert availability.accepting == {0}
            assert str(availability) == "replica 1 is rebuilt and loads weights, replica 2 loads weights"
        assert availability.accepting == {0, 2}
    assert (availability.accepting, availability.is_rebuilding(), str(availability)) == ({0, 1, 2}, False, "")
    assert [availability.num_absences(index) for index in range(3)] == [0, 2, 1]


def test_an_error_in_the_block_brings_the_replica_back() -> None:
    availability = ReplicaAvailability(1)
    with pytest.raises(OSError, match="disk"), availability.absent([0], "loads weights"):
        raise OSError("disk")
    assert availability.accepting == {0}


def test_who_takes_requests_is_the_same_object_until_it_changes() -> None:
    availability = ReplicaAvailability(2)
    before = availability.accepting
    assert availability.accepting is before
    with availability.absent([0], "loads weights"):
        assert availability.accepting is not before


async def test_whoever_waits_hears_of_a_coming_and_of_a_going() -> None:
    availability = ReplicaAvailability(1)
    heard: list[str] = []

    async def listen() -> None:
        await availability.changed()
        heard.append("gone")
        await availability.changed()
        heard.append("back")

    task = asyncio.create_task(listen())
    await asyncio.sleep(0)
    with availability.absent([0], "loads weights"):
        for _ in range(3):
            await asyncio.sleep(0)
        assert heard == ["gone"]
    await task
    assert heard == ["gone", "back"]
