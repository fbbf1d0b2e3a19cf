"""Requests and rolling weight syncs at the same time: who is asked, and under which weights it answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chatlearn_core.config.models import RolloutConfig
from chatlearn_core.executor.rollouts.manager import RolloutManager
from chatlearn_core.plugins.records import WeightSyncSpec
from chatlearn_core.protocols import ModelSource, RoleContext
from chatlearn_core.runtime.plan import WeightRoute
from chatlearn_core.runtime.serial_executor import SerialExecutor
from chatlearn_core.types import Completion, GenerateRequest, SamplingParams
from chatlearn_local.fleet import LocalFleet
from chatlearn_local.trainer import LocalTrainer
from chatlearn_local.weight_ends import LocalReceivers, LocalSenders
from chatlearn_runtime_kit.weight_transfer import WeightTransfer
from chatlearn_testing.fakes.bigram import build_bigram_model
from chatlearn_testing.fakes.generator import FakeGenerator
from chatlearn_testing.fakes.options import FakeGeneratorOptions, FakeOptions, FakeTrainerOptions
from chatlearn_testing.fakes.queue_sync import FakeReceiver, FakeSender
from chatlearn_testing.fakes.trainer import FakeTrainer

NUM_REPLICAS = 3


class WatchedGenerator(FakeGenerator):
    """Writes down what it is given, and how it and the others were then."""

    def __init__(self, context: RoleContext, given: list[tuple[int, str, tuple[str, ...], int]]) -> None:
        super().__init__(FakeGeneratorOptions(), context)
        self.given = given
        self.all: Collection[WatchedGenerator] = ()
        self.open_at_begin: list[int] = []
        """Requests that could sample when it began to load."""
        self.sampled_beside: set[int] = set()
        """Which other replicas sampled while it loaded."""

    def stop_serving(self) -> None:
        super().stop_serving()
        self.open_at_begin.append(0 if self._paused else len(self._running))

    def _append_token(self, run: Any, forced: int | None = None) -> int:
        for other in self.all:
            if other.state == "loading":
                other.sampled_beside.add(self.context.replica)
        return super()._append_token(run, forced)

    async def generate(self, request: GenerateRequest, on_tokens: Any = None) -> Completion:
        states = tuple(replica.state for replica in self.all)
        self.given.append((self.context.replica, request.id, states, self.policy_version))
        return await super().generate(request, on_tokens)


class Stand:
    """A fleet of fakes, what may be asked of it, and a trainer that sends it weights."""

    def __init__(self, model: Path, fleet_rule: Any, max_loading: int, tmp_path: Path) -> None:
        self.given: list[tuple[int, str, tuple[str, ...], int]] = []
        """(replica, request, state of every replica then, its version then)"""
        source = ModelSource(str(model), str(model), max_length=2000)
        self.executor = SerialExecutor("trainer", 30.0)
        self.trainer = FakeTrainer(FakeTrainerOptions(), RoleContext("trainer", source))
        self.trainer.setup()
        self.fleet = LocalFleet(
            "generator",
            lambda index: WatchedGenerator(RoleContext("generator", source, replica=index), self.given),
            NUM_REPLICAS,
            self.executor,
            max_restarts=0,
        )
        ends = {"sender": FakeSender, "receiver": FakeReceiver}
        registry: Any = SimpleNamespace(
            load_factory=lambda record, attribute: ends[attribute], origin=lambda record: "acme 1.0"
        )
        record = WeightSyncSpec(name="fake", sender="f:S", receiver="f:R", options="f:O")
        plan = WeightRoute(
            "trainer", "generator", record, FakeOptions(), "test", fleet_rule, 1 << 20, 30.0, max_loading=max_loading
        )
        self.connect = lambda: WeightTransfer(
            plan,
            tmp_path,
            LocalSenders(plan, registry, LocalTrainer("trainer", self.trainer, self.executor)),
            LocalReceivers(plan, registry, self.fleet),
        )

    async def start(self) -> None:
        await self.fleet.start()
        self.transfer = self.connect()
        for replica in self.fleet.replicas:
            assert isinstance(replica, WatchedGenerator)
            replica.all = self.fleet.replicas  # type: ignore[assignment]  # all are such generators

    async def sync(self, version: int) -> None:
        receipts = await self.transfer.sync(range(NUM_REPLICAS), version)
        assert [receipt.state for receipt in receipts] == ["serving"] * NUM_REPLICAS

    def close(self) -> None:
        self.fleet.close()
        self.trainer.close()
        self.executor.stop()


@pytest.fixture
async def make_stand(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    stands: list[Stand] = []
    model = build_bigram_model(tmp_path / "model")

    async def make(fleet_rule: str, max_loading: int = 1) -> Stand:
        stands.append(Stand(model, fleet_rule, max_loading, tmp_path))
        await stands[-1].start()
        return stands[-1]

    yield make
    for stand in stands:
        stand.close()


@pytest.mark.parametrize(
    ("fleet_rule", "max_loading", "settings"),
    [
        ("rolling", 1, {}),
        ("rolling", 2, {"max_concurrent": 2}),
        ("rolling", 1, {"max_concurrent": 2, "work_stealing": True}),
        ("barrier", 1, {"max_concurrent": 2}),
    ],
)
async def test_no_request_is_given_to_a_replica_that_loads_while_another_serves(
    fleet_rule: str, max_loading: int, settings: dict[str, Any], make_stand: Callable[..., Any]
) -> None:
    stand: Stand = await make_stand(fleet_rule, max_loading)
    manager = RolloutManager(lambda: stand.fleet, RolloutConfig(max_retries=0, **settings))
    asked: list[str] = []
    answers: list[asyncio.Task[Completion]] = []

    def ask(group: str) -> None:
        for number in range(3):
            name = f"{group}#{number}"
            request = GenerateRequest(name, np.array([1, 2]), SamplingParams(4, ignore_eos=True), group)
            asked.append(name)
            answers.append(asyncio.create_task(manager.generate(request)))

    for version in (1, 2, 3):
        syncing = asyncio.create_task(stand.sync(version))
        step = 0
        while not syncing.done():
            ask(f"v{version} new {step}")
            ask(f"conversation {step % 2}")  # whose prefix is where its last request was
            await asyncio.sleep(0.001)
            step += 1
        await syncing
        assert stand.fleet.policy_version == version
    completions = await asyncio.gather(*answers)

    assert [completion.request_id for completion in completions] == asked, "each is answered once, and none failed"
    assert sorted(name for _, name, _, _ in stand.given) == sorted(asked), "each was given to one replica"
    during = [states for _, _, states, _ in stand.given if "loading" in states]
    if fleet_rule == "rolling":
        assert during, "requests came while a replica loaded"
    for replica, name, states, _ in stand.given:
        assert states[replica] == "serving", f"{name} was given to replica {replica} of {states}"
    assert {replica for replica, _, _, _ in stand.given} == set(range(NUM_REPLICAS))
    version_at = {name: version for _, name, _, version in stand.given if not name.startswith("conversation")}
    for completion in completions:
        versions = [span.version for span in completion.version_spans]
        assert versions == sorted(versions), "weights only become newer"
        if completion.request_id in version_at:
            assert versions[0] >= version_at[completion.request_id]
    last = await stand.fleet.generate(GenerateRequest("last", np.array([1]), SamplingParams(2, ignore_eos=True)))
    assert [span.version for span in last.version_spans] == [3]


@pytest.mark.parametrize(("at_sync", "fleet_rule"), [("abort", "rolling"), ("pause", "rolling"), ("abort", "barrier")])
async def test_only_requests_of_the_replicas_that_load_are_interrupted(
    at_sync: Any, fleet_rule: str, make_stand: Callable[..., Any]
) -> None:
    stand: Stand = await make_stand(fleet_rule)
    replicas: Any = stand.fleet.replicas
    stand.fleet.at_sync = at_sync
    endless = SamplingParams(1500, ignore_eos=True)  # longer than the syncs of three replicas
    asked = [GenerateRequest(f"{index}", np.array([1]), endless) for index in range(2 * NUM_REPLICAS)]
    tasks = [asyncio.create_task(stand.fleet.generate(one, index % NUM_REPLICAS)) for index, one in enumerate(asked)]
    for _ in range(5):
        await asyncio.sleep(0)
    await stand.sync(1)
    assert [replica.open_at_begin for replica in replicas] == [[0]] * NUM_REPLICAS
    if fleet_rule == "rolling":
        assert replicas[0].sampled_beside == {1, 2}
    else:
        assert [replica.sampled_beside for replica in replicas] == [set()] * NUM_REPLICAS
    completions = await asyncio.gather(*tasks)
    reasons = {completion.finish_reason for completion in completions}
    assert reasons == ({"abort"} if at_sync == "abort" else {"length"})
    if at_sync == "pause":
        assert [[span.version for span in one.version_spans] for one in completions] == [[0, 1]] * len(asked)
