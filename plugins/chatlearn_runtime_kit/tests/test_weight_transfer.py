"""One sync: the manifest first, then the bytes, then the confirmation; a replica is serving or dead, never between."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_core.plugins.records import WeightSyncSpec
from chatlearn_core.runtime.plan import WeightRoute
from chatlearn_core.runtime.serial_executor import SerialExecutor
from chatlearn_core.types import SyncOffer, SyncRequest, TensorSpec, WeightManifest
from chatlearn_local.trainer import LocalTrainer
from chatlearn_local.weight_ends import LocalReceivers, LocalSenders
from chatlearn_runtime_kit.weight_transfer import WeightTransfer

MANIFEST = WeightManifest({"w": TensorSpec("w", (2, 3), "float32")})


class Options(BaseModel):
    """None."""


class FakeSender:
    """Records its calls; fails at those that the test names."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.fail_in = ""
        self.offers: Any = None
        self.block: threading.Event | None = None

    def offer(self, plan: SyncRequest) -> SyncOffer:
        self.events.append("offer")
        if self.fail_in == "offer":
            raise OSError("no shared memory")
        if self.fail_in == "exit":
            raise SystemExit(3)
        return self.offers if self.offers is not None else SyncOffer(0, plan.sync_id)

    def send(self, plan: SyncRequest, trainer: Any) -> int:
        self.events.append("send")
        if self.fail_in == "send":
            raise RuntimeError("out of memory")
        if self.block is not None:
            self.block.wait()
        return 24

    def release(self, plan: SyncRequest) -> None:
        self.events.append("release")
        if self.block is not None:
            self.block.set()

    def close(self) -> None:
        self.events.append("close sender")


class FakeReceiver:
    """Gets 24 bytes at once, or fails, or waits for ever."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.behaviour = "take"
        self.returns: Any = 24

    async def receive(self, plan: SyncRequest, offers: Sequence[SyncOffer], loader: Any) -> int:
        self.events.append(f"receive {loader.name}")
        if self.behaviour == "fail":
            raise WeightSyncError("checksum of w is wrong")
        if self.behaviour == "wait":
            await asyncio.Event().wait()
        if self.behaviour == "exit":
            raise SystemExit(3)
        return self.returns

    def close(self) -> None:
        self.events.append("close receiver")


class FakeLoader:
    """One replica's side."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events
        self.version = 0
        self.confirms: int | None = None
        self.refuses = ""
        self.hangs = False
        self.failure: str | None = None
        self.is_dead = False
        self.expects = MANIFEST
        self.num_asked = 0

    def expected_manifest(self) -> WeightManifest:
        self.num_asked += 1
        return self.expects

    async def begin(self, policy_version: int, manifest: WeightManifest) -> None:
        self.events.append(f"begin {self.name}")
        if self.is_dead:
            raise WeightSyncError(f"{self.name} is dead and cannot begin version {policy_version}")
        if self.refuses:
            raise WeightSyncError(self.refuses)
        if self.hangs:
            await asyncio.Event().wait()
        self.version = policy_version

    async def finish(self) -> int:
        self.events.append(f"finish {self.name}")
        return self.version if self.confirms is None else self.confirms

    async def fail(self, reason: str) -> None:
        self.failure = reason
        self.is_dead = True


class FakeReplica:
    """Dead or not."""

    def __init__(self, loader: FakeLoader) -> None:
        self.loader = loader

    @property
    def state(self) -> str:
        return "dead" if self.loader.is_dead else "serving"


class Scene:
    """A transfer between one trainer and two replicas."""

    def __init__(
        self, tmp_path: Path, *, timeout_s: float = 30.0, replicas: str = "ab", replayable: bool = False, **rule: Any
    ) -> None:
        self.events: list[str] = []
        self.sender = FakeSender(self.events)
        self.loaders = [FakeLoader(name, self.events) for name in replicas]
        registry = SimpleNamespace(
            load_factory=lambda record, attribute: (
                (lambda options, endpoint: self.sender)
                if attribute == "sender"
                else (lambda options, endpoint: FakeReceiver(self.events))
            ),
            origin=lambda record: "acme-sync 1.2",
        )
        plan = WeightRoute(
            trainer="trainer",
            target="generator",
            record=WeightSyncSpec(name="fake", sender="f:S", receiver="f:R", options="f:O", replayable=replayable),
            options=Options(),
            why="test",
            bucket_bytes=1 << 20,
            timeout_s=timeout_s,
            **({"fleet_rule": "barrier"} | rule),
        )
        self.executor = SerialExecutor("trainer", 30.0)
        trainer: Any = SimpleNamespace(manifest=lambda payload: MANIFEST)
        self.fleet: Any = SimpleNamespace(
            num_replicas=len(replicas),
            replicas=[FakeReplica(loader) for loader in self.loaders],
            loading=lambda indices: nullcontext(),
            interrupted=lambda indices: nullcontext(),
        )
        senders = LocalSenders(plan, registry, LocalTrainer("trainer", trainer, self.executor))  # type: ignore[arg-type]  # the part that is used
        receivers = LocalReceivers(plan, registry, self.fleet)  # type: ignore[arg-type]  # likewise
        self.transfer = WeightTransfer(plan, tmp_path, senders, receivers)
        self.receivers: list[Any] = list(receivers.receivers)

    async def sync(self, version: int = 3) -> Any:
        return await asyncio.wait_for(self.transfer.sync(range(len(self.loaders)), version), 30.0)

    async def resync(self, index: int, version: int = 3) -> Any:
        """As after the replica was rebuilt."""
        self.fleet.replicas[index] = FakeReplica(self.loaders[index])
        return await asyncio.wait_for(self.transfer.resync(index, version), 30.0)


@pytest.fixture
def make_scene(tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    scenes: list[Scene] = []

    def make(**settings: Any) -> Scene:
        scenes.append(Scene(tmp_path, **settings))
        return scenes[-1]

    yield make
    for scene in scenes:
        scene.executor.stop()


@pytest.fixture
def scene(make_scene: Callable[..., Scene]) -> Scene:
    return make_scene()


async def test_every_replica_confirms_the_version_it_serves(scene: Scene) -> None:
    receipts = await scene.sync(3)
    assert [(r.replica, r.policy_version, r.state, r.num_bytes) for r in receipts] == [
        (0, 3, "serving", 24),
        (1, 3, "serving", 24),
    ]
    assert scene.events[:3] == ["begin a", "begin b", "offer"], "every manifest is checked before the sync opens"
    assert scene.events[-1] == "release"


async def test_a_manifest_that_does_not_match_moves_no_byte(scene: Scene) -> None:
    scene.loaders[1].refuses = "w: shape [2, 3] offered, [2, 4] expected"
    with pytest.raises(WeightSyncError, match=r"w: shape \[2, 3\] offered"):
        await scene.sync()
    assert scene.events == ["begin a", "begin b"]
    assert scene.loaders[0].failure == "another replica refused the weights: w: shape [2, 3] offered, [2, 4] expected"


async def test_another_model_is_refused_while_every_replica_serves_on(scene: Scene) -> None:
    scene.loaders[1].expects = WeightManifest({"w": TensorSpec("w", (2, 4), "float32")})
    told = r"replica 1, hold different models: 1 tensors differ.*\n  w: shape \[2, 3\] offered, \[2, 4\] expected"
    with pytest.raises(WeightSyncError, match=told):
        await scene.sync()
    assert scene.events == [], "no replica began"
    assert [loader.failure for loader in scene.loaders] == [None, None]
    scene.loaders[1].expects = WeightManifest({"w": TensorSpec("w", (2, 3), "bfloat16")})
    assert [receipt.state for receipt in await scene.sync()] == ["serving"] * 2, "dtypes are the loader's affair"
    asked = [loader.num_asked for loader in scene.loaders]
    await scene.sync(4)
    assert [loader.num_asked for loader in scene.loaders] == asked, "the same manifest is compared once"


async def test_a_replica_that_never_stops_serving_is_dead_and_the_other_gets_the_weights(
    make_scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chatlearn_local.weight_ends.GRACE_S", 0.0)
    scene = make_scene(timeout_s=0.05)
    scene.loaders[1].hangs = True
    dead, serving = await scene.sync(3)
    assert (dead.replica, dead.state, serving.replica, serving.state) == (1, "dead", 0, "serving")
    assert "replica 1: it did not stop serving within 0.05 s (weight_sync.timeout_s" in dead.error
    assert "receive a" in scene.events
    assert "receive b" not in scene.events


@pytest.mark.parametrize("replayable", [False, True])
async def test_a_replica_that_died_before_it_began_keeps_the_weights_from_no_other(
    make_scene: Callable[..., Scene], replayable: bool
) -> None:
    scene = make_scene(fleet_rule="rolling" if replayable else "barrier", max_loading=2, replayable=replayable)
    scene.loaders[0].is_dead = True
    planned: list[tuple[int, ...]] = []
    offer = scene.sender.offer
    scene.sender.offer = lambda plan: planned.append(tuple(r.replica for r in plan.receivers)) or offer(plan)  # type: ignore[method-assign]
    dead, serving = await scene.sync(3)
    assert (dead.replica, dead.state, dead.error) == (
        0,
        "dead",
        "WeightSyncError: a is dead and cannot begin version 3",
    )
    assert (serving.replica, serving.policy_version, serving.state) == (1, 3, "serving")
    assert planned == [(0, 1) if replayable else (1,)], "a sender waits for those who come"


async def test_nothing_is_sent_where_every_replica_is_dead(scene: Scene) -> None:
    for loader in scene.loaders:
        loader.is_dead = True
    assert [receipt.state for receipt in await scene.sync(3)] == ["dead", "dead"]
    assert scene.events == ["begin a", "begin b"]


async def test_requests_go_past_the_replicas_of_a_turn_from_before_it_begins(make_scene: Callable[..., Scene]) -> None:
    for rule in ({"fleet_rule": "rolling"}, {"fleet_rule": "rolling", "replayable": True}, {"fleet_rule": "barrier"}):
        scene = make_scene(replicas="ab", **rule)
        events = scene.events

        @contextmanager
        def loading(indices: Sequence[int], events: list[str] = events) -> Iterator[None]:
            events.append(f"past {list(indices)}")
            yield
            events.append(f"back {list(indices)}")

        scene.fleet.loading = loading
        await scene.sync(1)
        marks = [event for event in events if event.split()[0] in ("past", "begin", "finish", "back")]
        if rule["fleet_rule"] == "barrier":
            assert marks == ["past [0, 1]", "begin a", "begin b", "finish a", "finish b", "back [0, 1]"]
        else:
            assert marks == [
                *("past [0]", "begin a", "finish a", "back [0]"),
                *("past [1]", "begin b", "finish b", "back [1]"),
            ]
        del events[:]
        await scene.resync(1, 1)
        assert [e for e in events if e.split()[0] in ("past", "back")] == ["past [1]", "back [1]"]


async def test_a_receiver_that_fails_leaves_its_replica_dead_and_the_other_serving(scene: Scene) -> None:
    scene.receivers[0].behaviour = "fail"
    dead, serving = await scene.sync()
    assert (dead.state, dead.error) == ("dead", "WeightSyncError: checksum of w is wrong")
    assert scene.loaders[0].failure == "checksum of w is wrong"
    assert serving.state == "serving"
    assert "release" in scene.events


async def test_a_replica_that_confirms_another_version_is_dead(scene: Scene) -> None:
    scene.loaders[1].confirms = 2
    _, stale = await scene.sync(3)
    assert stale.state == "dead"
    assert scene.loaders[1].failure == "it confirmed version 2 where 3 was sent"


@pytest.mark.parametrize("moment", ["offer", "send"])
async def test_a_sender_that_fails_ends_the_wait_of_every_receiver(scene: Scene, moment: str) -> None:
    scene.sender.fail_in = moment
    for receiver in scene.receivers:
        receiver.behaviour = "wait"
    receipts = await scene.sync()
    assert [receipt.state for receipt in receipts] == ["dead", "dead"]
    for receipt, loader in zip(receipts, scene.loaders, strict=True):
        assert receipt.error is not None
        assert receipt.error.startswith("the sender failed: ")
        assert loader.failure == receipt.error
    assert scene.events[-1] == "release"


@pytest.mark.parametrize("offer", ["a path", {"path": "/x"}, (0, "x"), SyncOffer(1, "x"), SyncOffer("0", "x")])
async def test_an_offer_of_a_wrong_type_ends_the_sync_at_once_and_names_the_plugin(scene: Scene, offer: Any) -> None:
    scene.sender.offers = offer
    for receiver in scene.receivers:
        receiver.behaviour = "wait"
    receipts = await scene.sync()
    assert [receipt.state for receipt in receipts] == ["dead", "dead"]
    for receipt in receipts:
        assert "weight sync 'fake' (acme-sync 1.2): offer() of its sender" in (receipt.error or "")
    assert "receive a" not in scene.events, "no receiver waits for a sender without an offer"


@pytest.mark.parametrize("returned", [None, "24", 2.5, -1, True])
async def test_a_receiver_that_returns_no_number_is_named(scene: Scene, returned: Any) -> None:
    scene.receivers[0].returns = returned
    dead, serving = await scene.sync()
    assert (dead.state, serving.state) == ("dead", "serving")
    assert "weight sync 'fake' (acme-sync 1.2): receive() of its receiver returned" in (dead.error or "")


@pytest.mark.parametrize("end", ["offer", "receive"])
async def test_an_end_that_calls_sys_exit_has_failed(scene: Scene, end: str) -> None:
    if end == "offer":
        scene.sender.fail_in = "exit"
    else:
        scene.receivers[0].behaviour = scene.receivers[1].behaviour = "exit"
    receipts = await scene.sync()
    assert [receipt.state for receipt in receipts] == ["dead", "dead"]
    assert "SystemExit" in (receipts[0].error or "")


async def test_a_sender_that_nobody_listens_to_is_ended(
    make_scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait out ``timeout_s`` for receivers that are dead."""
    monkeypatch.setattr("chatlearn_runtime_kit.weight_transfer._NOTICE_S", 0.01)
    scene = make_scene(timeout_s=1e6)
    scene.sender.block = threading.Event()
    for receiver in scene.receivers:
        receiver.behaviour = "fail"
    receipts = await scene.sync()
    assert [receipt.error for receipt in receipts] == ["WeightSyncError: checksum of w is wrong"] * 2


async def test_a_receivers_own_failure_is_kept_when_the_sender_fails_too(scene: Scene) -> None:
    scene.receivers[0].behaviour = "fail"
    scene.receivers[1].behaviour = "wait"
    scene.sender.fail_in = "send"
    first, second = await scene.sync()
    assert {first.state, second.state} == {"dead"}
    assert second.error == "the sender failed: role 'trainer': send weights failed: RuntimeError: out of memory"


async def test_stopping_the_run_releases_the_sender(scene: Scene) -> None:
    scene.sender.block = threading.Event()
    for receiver in scene.receivers:
        receiver.behaviour = "wait"
    task = asyncio.create_task(scene.sync())
    while "receive b" not in scene.events or "send" not in scene.events:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "release" in scene.events
    assert scene.executor.stop(wait_s=30.0), "its thread is free again"


def turns_of(events: list[str]) -> list[set[str]]:
    """Which replicas were between ``begin`` and ``finish`` at the same time, turn by turn."""
    loading: set[str] = set()
    turns: list[set[str]] = []
    for event in events:
        kind, _, name = event.partition(" ")
        if kind == "begin":
            if not loading:
                turns.append(set())
            loading.add(name)
            turns[-1].add(name)
        elif kind == "finish":
            loading.remove(name)
    return turns


async def test_a_rolling_fleet_loads_a_few_replicas_at_a_time(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(replicas="abcde", fleet_rule="rolling", max_loading=2)
    receipts = await scene.sync()
    assert [(receipt.replica, receipt.state) for receipt in receipts] == [(index, "serving") for index in range(5)]
    assert turns_of(scene.events) == [{"a", "b"}, {"c", "d"}, {"e"}]
    assert scene.events.count("offer") == scene.events.count("release") == 3, "each turn is a sync of its own"


async def test_a_rolling_fleet_is_sent_to_once_where_the_transport_keeps_the_version(
    make_scene: Callable[..., Scene],
) -> None:
    """No replica stops serving before the trainer has sent everything."""
    scene = make_scene(replicas="abc", fleet_rule="rolling", replayable=True)
    receipts = await scene.sync()
    assert [receipt.state for receipt in receipts] == ["serving"] * 3
    assert scene.events[:2] == ["offer", "send"]
    assert turns_of(scene.events) == [{"a"}, {"b"}, {"c"}]
    assert scene.events.count("send") == 1
    assert scene.events[-1] == "release"


async def test_a_sender_that_fails_ahead_leaves_every_replica_serving(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(replicas="ab", fleet_rule="rolling", replayable=True)
    scene.sender.fail_in = "send"
    with pytest.raises(WeightSyncError, match=r"the sender failed before a replica began: .*out of memory"):
        await scene.sync()
    assert scene.events == ["offer", "send", "release"]
    assert [loader.failure for loader in scene.loaders] == [None, None]


async def test_a_rebuilt_replica_takes_the_kept_version_without_the_trainer(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(replayable=True)
    await scene.sync(3)
    del scene.events[:]
    receipt = await scene.resync(1, 3)
    assert receipt.state == "serving"
    assert scene.events == ["close receiver", "begin b", "receive b", "finish b"]


async def test_a_rebuilt_replica_gets_the_weights_once_more_where_nothing_is_kept(scene: Scene) -> None:
    await scene.sync(3)
    del scene.events[:]
    receipt = await scene.resync(0, 3)
    assert receipt.state == "serving"
    assert sorted(scene.events) == ["begin a", "close receiver", "finish a", "offer", "receive a", "release", "send"]


async def test_a_receipt_tells_what_share_of_the_weights_travelled(scene: Scene) -> None:
    receipt, _ = await scene.sync()
    assert (receipt.num_bytes, receipt.weight_bytes) == (24, 2 * 3 * 4)


async def test_close_reaches_both_ends(scene: Scene) -> None:
    scene.transfer.close()
    assert scene.events == ["close sender", "close receiver", "close receiver"]


async def test_a_replica_that_is_rebuilt_while_the_trainer_sends_takes_what_it_sends(
    make_scene: Callable[..., Scene],
) -> None:
    """Replicas serve, and may die, until their turn."""
    scene = make_scene(fleet_rule="rolling", replayable=True)
    scene.sender.block = threading.Event()
    syncing = asyncio.create_task(scene.sync(3))
    while "send" not in scene.events:
        await asyncio.sleep(0.001)
    rebuilt = asyncio.create_task(scene.resync(1, 3))
    await asyncio.sleep(0.01)
    assert "begin b" not in scene.events
    scene.sender.block.set()
    assert (await rebuilt).state == "serving"
    assert [receipt.state for receipt in await syncing] == ["serving", "serving"]
    assert (scene.events.count("send"), scene.events.count("close receiver")) == (1, 1)
