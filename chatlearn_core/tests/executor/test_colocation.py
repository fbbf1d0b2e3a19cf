"""Leases on shared devices: order, moves, what is checked of them, and what is known after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from chatlearn_core.exceptions import BackendError, TrainerLostError
from chatlearn_core.executor.colocation import ColocationManager
from chatlearn_core.executor.device_sharing import DeviceUse, OffloadMode
from chatlearn_core.metrics import Timers
from chatlearn_core.protocols import Device, MemoryAction, MemoryEvent, MemoryPart

GPU0, GPU1 = Device("GPU 0", is_gpu=True), Device("GPU 1", is_gpu=True)
ROLES: Any = {
    "trainer": SimpleNamespace(name="trainer", kind="trainer", trainable=True, holds_a_model=True),
    "reference": SimpleNamespace(name="reference", kind="trainer", trainable=False, holds_a_model=True),
    "generator": SimpleNamespace(name="generator", kind="generator", trainable=False, holds_a_model=True),
}
SHARED = {"trainer": {GPU0}, "generator": {GPU0}}
GENERATE, COMPUTE = DeviceUse("generator", "generate"), DeviceUse("trainer", "compute")


class FakeGroup:
    """Every part takes 8 bytes, of each of two workers."""

    def __init__(self, role: str, runtime: FakeRuntime) -> None:
        self.role = role
        self.runtime = runtime

    async def offload(self, parts: Collection[MemoryPart]) -> list[MemoryEvent]:
        return await self.move("offload", parts)

    async def onload(self, parts: Collection[MemoryPart]) -> list[MemoryEvent]:
        return await self.move("onload", parts)

    async def move(self, action: MemoryAction, parts: Collection[MemoryPart]) -> list[MemoryEvent]:
        await asyncio.sleep(0)
        if self.runtime.failure is not None:
            raise self.runtime.failure
        self.runtime.did.append(f"{action} {self.role} {' '.join(parts)}")
        live = 8 if action == "onload" or self.role == self.runtime.liar else 0
        return [MemoryEvent(self.role, worker, action, part, live) for part in parts for worker in range(2)]


class FakeRuntime:
    def __init__(self, devices: dict[str, set[Device]], actual: dict[str, set[Device]] | None = None) -> None:
        self.planned, self.actual = devices, actual or devices
        self.started = False
        self.did: list[str] = []
        self.failure: Exception | None = None
        self.liar: str | None = None

    def devices(self) -> dict[str, frozenset[Device]]:
        return {role: frozenset(own) for role, own in (self.actual if self.started else self.planned).items()}

    async def start(self, role_is_up: Any = None) -> None:
        for role in self.planned:
            self.did.append(f"start {role}")
            if role_is_up is not None:
                await role_is_up(role)
        self.started = True

    async def recover(self, lost: TrainerLostError) -> None:
        self.did.append("recover")

    def trainer(self, role: str) -> FakeGroup:
        return FakeGroup(role, self)

    generator = trainer


def leases_on(runtime: FakeRuntime, mode: OffloadMode = "auto") -> ColocationManager:
    return ColocationManager(runtime, ROLES, mode)  # type: ignore[arg-type]  # the part that is used


def told(timers: Timers) -> list[tuple[str, str, Any]]:
    return [(entry["action"], entry["role"], entry["live_bytes"]) for entry in timers.trace()]


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_role_is_put_aside_before_the_next_starts() -> None:
    runtime, timers = FakeRuntime(SHARED), Timers()
    await leases_on(runtime).start(timers)
    assert runtime.did == [
        "start trainer",
        "offload trainer weights gradients optimizer",
        "start generator",
        "offload generator weights kv_cache",
    ]
    nothing = {"0": 0, "1": 0}
    assert told(timers) == [
        ("offload", "trainer", {"weights": nothing, "gradients": nothing, "optimizer": nothing}),
        ("offload", "generator", {"weights": nothing, "kv_cache": nothing}),
    ]


async def test_without_sharing_nothing_is_asked_of_anybody() -> None:
    runtime = FakeRuntime({"trainer": {GPU0}, "generator": {GPU1}})
    colocation, timers = leases_on(runtime), Timers()
    await colocation.start(Timers())
    async with colocation.lease(GENERATE, timers=timers), colocation.lease(COMPUTE, timers=timers):
        pass
    assert runtime.did == ["start trainer", "start generator"]
    assert timers.metrics() == {}


async def test_a_role_that_sits_alone_after_all_is_brought_back_for_good() -> None:
    runtime = FakeRuntime(SHARED, actual={"trainer": {GPU0}, "generator": {GPU1}})
    colocation, timers = leases_on(runtime), Timers()
    await colocation.start(timers)
    assert runtime.did[-2:] == ["onload trainer weights gradients optimizer", "onload generator weights kv_cache"]
    assert [(action, role) for action, role, _ in told(timers)][-2:] == [("onload", "trainer"), ("onload", "generator")]
    async with colocation.lease(COMPUTE, timers=Timers()):
        pass
    assert len(runtime.did) == 6


async def test_moves_are_timed_and_in_the_trace_with_what_is_live() -> None:
    runtime = FakeRuntime(SHARED)
    colocation, timers = leases_on(runtime), Timers()
    await colocation.start(Timers())
    async with colocation.lease(COMPUTE, timers=timers, level=1):
        pass
    async with colocation.lease(GENERATE, timers=timers, level=0):
        pass
    assert [(e["action"], e["role"], e["level"], e["live_bytes"]) for e in timers.trace()] == [
        ("onload", "trainer", 1, {"weights": {"0": 8, "1": 8}}),
        ("offload", "trainer", 0, {"weights": {"0": 0, "1": 0}}),
        ("onload", "generator", 0, {"weights": {"0": 8, "1": 8}, "kv_cache": {"0": 8, "1": 8}}),
    ]
    assert set(timers.metrics()) == {"timing_s/offload", "timing_s/onload"}


async def test_a_backend_that_frees_nothing_is_found_out() -> None:
    runtime = FakeRuntime(SHARED)
    colocation = leases_on(runtime)
    await colocation.start(Timers())
    runtime.liar = "trainer"
    async with colocation.lease(COMPUTE, timers=Timers()):
        pass
    with pytest.raises(BackendError, match=r"'trainer', rank 0: weights were offloaded, but 8 bytes .* still live"):
        async with colocation.lease(GENERATE, timers=Timers()):
            pass


async def test_turns_on_one_device_are_granted_in_the_order_in_which_they_were_asked_for() -> None:
    colocation = leases_on(FakeRuntime(SHARED))
    entered: list[str] = []

    async def work(lease: Any, name: str, ready: asyncio.Event) -> None:
        await ready.wait()
        async with lease:
            entered.append(name)
            await settled()

    first, second = colocation.lease(GENERATE, timers=Timers()), colocation.lease(COMPUTE, timers=Timers())
    readies = [asyncio.Event(), asyncio.Event()]
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(work(first, "first", readies[0]))
        tasks.create_task(work(second, "second", readies[1]))
        readies[1].set()
        await settled()
        assert entered == [], "the second was ready first, but it is not its lease"
        readies[0].set()
    assert entered == ["first", "second"]


async def test_turns_on_different_devices_are_held_at_the_same_time() -> None:
    devices = {"trainer": {GPU0}, "generator": {GPU0}, "reference": {GPU1}}
    colocation = leases_on(FakeRuntime(devices))
    both = asyncio.Barrier(2)

    async def hold(use: DeviceUse) -> None:
        async with colocation.lease(use, timers=Timers()):
            await both.wait()  # passes only if both are inside

    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        tasks.create_task(hold(COMPUTE))
        tasks.create_task(hold(DeviceUse("reference", "compute")))


async def test_a_turn_that_is_given_up_lets_the_next_in() -> None:
    colocation = leases_on(FakeRuntime(SHARED))
    first = colocation.lease(GENERATE, timers=Timers())
    waiting = asyncio.create_task(colocation.lease(COMPUTE, timers=Timers()).__aenter__())
    behind = colocation.lease(GENERATE, timers=Timers())
    await settled()
    waiting.cancel()
    first.leave()
    first.leave()
    async with asyncio.timeout(5):
        async with behind:
            pass


async def test_after_a_failed_move_the_next_turn_makes_sure_of_it() -> None:
    runtime = FakeRuntime(SHARED)
    colocation = leases_on(runtime)
    await colocation.start(Timers())
    runtime.failure = BackendError("the rank does not answer")
    with pytest.raises(BackendError, match="does not answer"):
        async with colocation.lease(COMPUTE, timers=Timers()):
            pass
    runtime.failure, runtime.did = None, []
    async with colocation.lease(GENERATE, timers=Timers()):
        pass
    assert runtime.did[0] == "offload trainer weights", "it may be on the device or not"


async def test_a_trainer_is_rebuilt_with_the_generator_asleep_and_made_sure_of_afterwards() -> None:
    runtime = FakeRuntime(SHARED)
    colocation = leases_on(runtime)
    await colocation.start(Timers())
    async with colocation.lease(GENERATE, timers=Timers()):
        pass
    runtime.did, timers = [], Timers()
    await colocation.recover(TrainerLostError("rank 1 died"), timers)
    assert runtime.did == ["offload generator weights kv_cache", "recover"]
    assert told(timers) == [("offload", "generator", {"weights": {"0": 0, "1": 0}, "kv_cache": {"0": 0, "1": 0}})]
    async with colocation.lease(DeviceUse("trainer", "load"), timers=Timers()):
        pass
    assert runtime.did[2:] == ["offload trainer gradients", "onload trainer weights optimizer"]
