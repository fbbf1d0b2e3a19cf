"""Syncs over stand-ins for the workers: which worker is asked for what, and in which order."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from pydantic import BaseModel

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, TrainerLostError, WeightSyncError
from chatlearn_core.plugins.records import WeightSyncSpec
from chatlearn_core.runtime.plan import WeightRoute
from chatlearn_core.types import Endpoint, SyncReceipt, TensorSpec, WeightManifest
from chatlearn_runtime_kit.weight_transfer import WeightTransfer
from chatlearn_workers.errors import WorkerDiedError
from chatlearn_workers.weight_ends import RemoteFollower, RemoteReceivers, RemoteSenders, SharedRequest

MANIFEST = WeightManifest({"w": TensorSpec("w", (2, 3), "float32")})


class Options(BaseModel):
    """None."""


class FakeTrainerGroup:
    """Two ranks; writes down what all of them are asked for."""

    def __init__(self, events):
        self.events = events
        self.is_broken = False
        self.fail_in = ""

    async def every_rank(self, method, *args, timeout_s=None):
        self.events.append(method)
        await asyncio.sleep(0)
        if method == self.fail_in:
            raise BackendError("rank 1: out of memory")
        if method == "open_transport":
            return [Endpoint("trainer", 0, rank, "host", "cpu", rank) for rank in range(2)]
        return [None, None]

    async def manifest(self, payload):
        self.events.append("manifest")
        return MANIFEST


class FakeReplica:
    """A replica with a worker that takes everything."""

    def __init__(self, index, events):
        self.index, self.events = index, events
        self.state, self.policy_version = "serving", 0
        self.fails_to_begin: Exception | None = None
        self.worker = SimpleNamespace(call=self.call)

    async def call(self, method, *args, timeout_s=None):
        if method != "open_transport":
            self.events.append(f"{method} {self.index}")
        await asyncio.sleep(0)
        if method == "begin" and self.fails_to_begin is not None:
            raise self.fails_to_begin
        if method == "open_transport":
            return Endpoint("generator", self.index, 0, "host", "cpu", 10 + self.index)
        if method == "receive":
            plan, offers = args[1:]
            self.events.append(f"received {self.index}" + ("" if offers else " kept"))
            return SyncReceipt(self.index, plan.policy_version, "serving", 24)
        return None


async def lives(replica):
    return replica.state != "dead"


class Stand(NamedTuple):
    """A transfer, and what is behind it."""

    transfer: WeightTransfer
    events: list[str]
    trainer: FakeTrainerGroup
    fleet: SimpleNamespace


@pytest.fixture
def make_transfer(tmp_path):
    async def make(num_replicas=3, replayable=False, **rule):
        events = []
        record = WeightSyncSpec(name="fake", sender="f:S", receiver="f:R", options="f:O", replayable=replayable)
        settings = {"fleet_rule": "barrier"} | rule
        plan = WeightRoute(
            "trainer", "generator", record, Options(), "test", bucket_bytes=1 << 20, timeout_s=30.0, **settings
        )
        fleet = SimpleNamespace(
            replicas=[FakeReplica(index, events) for index in range(num_replicas)],
            loading=lambda indices: nullcontext(),
            interrupted=lambda indices: nullcontext(),
            lives=lives,
        )
        store = SimpleNamespace(put=lambda plan: plan)
        shared, group = SharedRequest(store), FakeTrainerGroup(events)
        senders = RemoteSenders("trainer->generator", None, shared, group)
        receivers = RemoteReceivers("trainer->generator", None, shared, fleet)
        transfer = WeightTransfer(plan, tmp_path, senders, receivers)
        await senders.open()
        del events[:]
        return Stand(transfer, events, group, fleet)

    return make


def phases(events):
    """What happened between one ``begin`` after a ``received`` and the next."""
    turns = []
    for event in events:
        kind, _, replica = event.partition(" ")
        if kind == "begin":
            if not turns or turns[-1][1]:
                turns.append((set(), set()))
            turns[-1][0].add(int(replica))
        elif kind == "received":
            turns[-1][1].add(int(replica.split()[0]))
    return turns


async def test_all_replicas_change_together(make_transfer):
    stand = await make_transfer()
    transfer, events = stand.transfer, stand.events
    receipts = await transfer.sync(range(3), 1)
    assert [receipt.state for receipt in receipts] == ["serving"] * 3
    assert phases(events) == [({0, 1, 2}, {0, 1, 2})]
    assert (events[0], events[-1]) == ("manifest", "release")


async def test_a_rolling_fleet_loads_a_few_replicas_at_a_time(make_transfer):
    stand = await make_transfer(fleet_rule="rolling", max_loading=2)
    transfer, events = stand.transfer, stand.events
    receipts = await transfer.sync(range(3), 1)
    assert [receipt.replica for receipt in receipts] == [0, 1, 2]
    assert phases(events) == [({0, 1}, {0, 1}), ({2}, {2})]
    assert events.count("send") == 2


@pytest.mark.parametrize("replayable", [False, True])
async def test_requests_go_past_the_replicas_of_a_turn_from_before_it_begins(make_transfer, replayable):
    stand = await make_transfer(num_replicas=2, fleet_rule="rolling", replayable=replayable)
    transfer, events = stand.transfer, stand.events

    @contextmanager
    def loading(indices):
        events.append(f"past {list(indices)}")
        yield
        events.append(f"back {list(indices)}")

    stand.fleet.loading = loading
    await transfer.sync(range(2), 1)
    marks = [event for event in events if event.split()[0] in ("past", "begin", "received", "back")]
    turns = [[f"past [{i}]", f"begin {i}", f"received {i}", f"back [{i}]"] for i in range(2)]
    assert marks == turns[0] + turns[1]
    del events[:]
    await transfer.resync(1, 1)
    assert [event for event in events if event.split()[0] in ("past", "back")] == ["past [1]", "back [1]"]


async def test_a_rolling_fleet_is_sent_to_once_where_the_transport_keeps_the_version(make_transfer):
    stand = await make_transfer(fleet_rule="rolling", replayable=True)
    transfer, events = stand.transfer, stand.events
    await transfer.sync(range(3), 1)
    assert phases(events) == [({0}, {0}), ({1}, {1}), ({2}, {2})]
    assert events[:3] == ["manifest", "offer", "send"], "no replica stops serving before everything was sent"
    assert events.count("send") == events.count("release") == 1


async def test_senders_that_fail_ahead_leave_every_replica_serving(make_transfer):
    stand = await make_transfer(fleet_rule="rolling", replayable=True)
    transfer, events = stand.transfer, stand.events
    stand.trainer.fail_in = "send"
    with pytest.raises(WeightSyncError, match=r"sender failed before a replica began: rank 1: out of memory"):
        await transfer.sync(range(3), 1)
    assert events == ["manifest", "offer", "send", "release"]


async def test_a_rebuilt_replica_takes_the_kept_version_without_the_trainer(make_transfer):
    stand = await make_transfer(replayable=True)
    transfer, events = stand.transfer, stand.events
    await transfer.sync(range(3), 4)
    stand.fleet.replicas[1] = FakeReplica(1, events)
    del events[:]
    receipt = await transfer.resync(1, 4)
    assert (receipt.state, receipt.policy_version) == ("serving", 4)
    assert events == ["begin 1", "receive 1", "received 1 kept"]


async def test_a_rebuilt_replica_gets_the_weights_once_more_where_nothing_is_kept(make_transfer):
    stand = await make_transfer()
    transfer, events = stand.transfer, stand.events
    await transfer.sync(range(3), 4)
    stand.fleet.replicas[1] = FakeReplica(1, events)
    del events[:]
    await transfer.resync(1, 4)
    assert "send" in events
    assert [event for event in events if event.endswith(("0", "2"))] == [], "the others serve on"


@pytest.mark.parametrize("engine_only", [False, True])
@pytest.mark.parametrize("replayable", [False, True])
async def test_a_replica_that_dies_as_a_sync_begins_keeps_the_weights_from_no_other(
    make_transfer, engine_only, replayable
):
    stand = await make_transfer(fleet_rule="rolling", max_loading=3, replayable=replayable)
    transfer, events = stand.transfer, stand.events
    dying = stand.fleet.replicas[1]
    if engine_only:  # the worker answers, its engine is gone
        dying.fails_to_begin = WeightSyncError("the replica is dead and cannot begin version 4")
        dying.state = "dead"
    else:
        dying.fails_to_begin = WorkerDiedError("the process is gone")
    planned = []
    every_rank = stand.trainer.every_rank

    async def watched(method, *args, **limits):
        if method == "send":
            planned.append([receiver.replica for receiver in args[1].receivers])
        return await every_rank(method, *args, **limits)

    stand.trainer.every_rank = watched
    receipts = {receipt.replica: receipt for receipt in await transfer.sync(range(3), 4)}
    assert {index: receipt.state for index, receipt in receipts.items()} == {0: "serving", 1: "dead", 2: "serving"}
    assert dying.state == "dead"
    assert planned == [[0, 1, 2] if replayable else [0, 2]], "a sender waits for those who come"
    assert "receive 1" not in events


async def test_a_replica_that_refuses_the_manifest_ends_the_sync(make_transfer):
    stand = await make_transfer()
    transfer, events = stand.transfer, stand.events
    stand.fleet.replicas[2].fails_to_begin = WeightSyncError("w: shape [2, 3] offered, [2, 4] expected")
    with pytest.raises(WeightSyncError, match="w: shape"):
        await transfer.sync(range(3), 4)
    assert [replica.state for replica in stand.fleet.replicas] == ["dead", "dead", "serving"]
    assert {"fail 0", "fail 1"} <= set(events)
    assert "send" not in events


async def test_no_replica_left_means_nothing_to_send(make_transfer):
    stand = await make_transfer(num_replicas=2)
    transfer, events = stand.transfer, stand.events
    for replica in stand.fleet.replicas:
        replica.fails_to_begin = BackendTimeoutError("no answer within 30 s")
    assert [receipt.state for receipt in await transfer.sync(range(2), 4)] == ["dead", "dead"]
    assert "send" not in events


class FakeFollower:
    """A trainer of ranks that follow another; rank ``dies`` is lost when it is to take weights."""

    def __init__(self, num_ranks, *, takes_tensors=True, dies=None):
        self.workers = [object() for _ in range(num_ranks)]
        self.takes_tensors, self.dies = takes_tensors, dies
        self.is_broken = False
        self.calls = []

    async def every_rank(self, method, *args, timeout_s=None):
        return [await self.one_rank(rank, method, *args) for rank in range(len(self.workers))]

    async def one_rank(self, rank, method, *args, timeout_s=None):
        self.calls.append((rank, method))
        await asyncio.sleep(0)
        if self.is_broken:
            raise TrainerLostError("it is broken since take failed")
        if method == "open_receiver":
            return Endpoint("reference", rank, 0, "host", "cpu", 20 + rank) if self.takes_tensors else None
        if method == "take":
            if rank == self.dies:
                self.is_broken = True
                raise TrainerLostError(f"rank {rank} was killed")
            return SyncReceipt(rank, args[1].policy_version, "serving", 24)
        return []


@pytest.fixture
def make_following(tmp_path):
    async def make(follower):
        record = WeightSyncSpec(name="fake", sender="f:S", receiver="f:R", options="f:O")
        route = WeightRoute("policy", "reference", record, Options(), "test", "barrier", 1 << 20, 30.0)
        shared = SharedRequest(SimpleNamespace(put=lambda plan: plan))
        senders = RemoteSenders("policy->reference", None, shared, FakeTrainerGroup([]))
        receivers = RemoteFollower("policy->reference", None, shared, follower, 0.5)
        await senders.open()
        return WeightTransfer(route, tmp_path, senders, receivers), receivers

    return make


async def test_every_rank_of_a_follower_takes_the_weights_and_a_rebuilt_one_gets_a_new_receiver(make_following):
    follower = FakeFollower(3)
    transfer, receivers = await make_following(follower)
    assert await receivers.open()
    receipts = await transfer.sync(range(3), 1)
    assert [(receipt.replica, receipt.state) for receipt in receipts] == [(rank, "serving") for rank in range(3)]
    opened = [rank for rank, method in follower.calls if method == "open_receiver"]
    assert opened == [0, 1, 2]
    follower.workers[1] = object()
    await transfer.sync(range(3), 2)
    assert [rank for rank, method in follower.calls if method == "open_receiver"] == [*opened, 1]


async def test_a_rank_that_dies_while_it_takes_weights_is_in_the_receipts(make_following):
    follower = FakeFollower(2, dies=1)
    transfer, receivers = await make_following(follower)
    await receivers.open()
    receipts = {receipt.replica: receipt for receipt in await transfer.sync(range(2), 1)}
    assert receipts[1].state == "dead"
    assert "rank 1 was killed" in receipts[1].error
    assert not await receivers.lives(0), "a trainer that lost a rank is broken as a whole"


async def test_a_follower_that_takes_no_tensors_is_not_connected(make_following):
    _, receivers = await make_following(FakeFollower(2, takes_tensors=False))
    assert not await receivers.open()
