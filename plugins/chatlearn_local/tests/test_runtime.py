"""The local runtime: builds roles in order, closes all of them whatever happens, rebuilds what a sync left dead."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from chatlearn_core.exceptions import ChatLearnError, ConfigError, ModelError, ReplicaLostError, WeightSyncError
from chatlearn_core.plugins.records import GeneratorSpec, RewardSpec, TrainerSpec, WeightSyncSpec
from chatlearn_core.protocols import Device, RuntimeEvent
from chatlearn_core.runtime.plan import BackendPlan, RolePlan, RunPlan, WeightRoute
from chatlearn_core.types import OutputRequest, Prompt, RewardResult, Sample, SyncOffer, WeightManifest
from chatlearn_local.options import LocalRuntimeOptions
from chatlearn_local.runtime import LocalRuntime
from chatlearn_runtime_kit.devices import resolve_device

SPECS = {"trainer": TrainerSpec, "generator": GeneratorSpec, "reward": RewardSpec}


class Options(BaseModel):
    """None."""


class FakeBackend:
    """A trainer, a generator and a reward in one; its name says how it misbehaves."""

    def __init__(self, events: list[str], context: Any, *, bad: str = "") -> None:
        self.events, self.context, self.bad = events, context, bad
        self.name = f"{context.role}{context.replica}"
        self.state, self.policy_version = "loading", 0
        self.loader = self
        self.threads: set[int] = set()

    def setup(self) -> None:
        self.events.append(f"setup {self.name}")
        if self.bad == "setup":
            raise ModelError("no weights in there")
        self.state = "serving"

    def close(self) -> None:
        self.events.append(f"close {self.name}")
        if self.bad == "close":
            raise OSError("port is gone")

    # trainer

    def manifest(self, payload: str = "full") -> WeightManifest:
        return WeightManifest({})

    def compute(self, batch: Any, request: Any) -> Any:
        self.threads.add(threading.get_ident())
        return {"batch": batch}

    # loader

    def expected_manifest(self) -> WeightManifest:
        return WeightManifest({})

    async def begin(self, policy_version: int, manifest: WeightManifest) -> None:
        self.policy_version = policy_version

    async def finish(self) -> int:
        if self.bad == "sync":
            raise WeightSyncError("w did not arrive")
        return self.policy_version

    async def fail(self, reason: str) -> None:
        self.state = "dead"

    # reward

    async def score(self, samples: Any) -> list[RewardResult]:
        return [RewardResult(1.0) for _ in samples]


class FakeTransport:
    """Both ends of a transport that moves nothing."""

    def offer(self, plan: Any) -> SyncOffer:
        return SyncOffer(0, None)

    def send(self, plan: Any, trainer: Any) -> int:
        return 0

    def release(self, plan: Any) -> None: ...

    def close(self) -> None: ...

    async def receive(self, plan: Any, offers: Any, loader: Any) -> int:
        return 0


class Scene:
    """A runtime over fake backends; ``bad`` says how the n-th object of a backend misbehaves."""

    def __init__(self, tmp_path: Path, bad: Mapping[str, list[str]] | None = None, **roles: Any) -> None:
        self.events: list[str] = []
        self.built: dict[str, list[FakeBackend]] = {}
        self.bad = dict(bad or {})
        syncs = ()
        if "trainer" in roles and "generator" in roles:
            record = WeightSyncSpec(name="none", sender="f:S", receiver="f:R", options="f:O")
            syncs = (WeightRoute("trainer", "generator", record, Options(), "test", "barrier", 1 << 20, 30.0),)
        registry: Any = SimpleNamespace(load_factory=self.load_factory, origin=lambda record: "acme 1.0")
        plans = {name: role_plan(name, **settings) for name, settings in roles.items()}
        self.plan = RunPlan(registry, plans, syncs, tmp_path, seed=5)
        self.runtime = LocalRuntime(LocalRuntimeOptions(), self.plan)

    def load_factory(self, record: Any, attribute: str = "factory") -> Callable[..., Any]:
        def build(options: Any, context: Any) -> FakeBackend:
            built = self.built.setdefault(record.name, [])
            behaviours = self.bad.get(record.name, [])
            bad = behaviours[len(built)] if len(built) < len(behaviours) else ""
            built.append(FakeBackend(self.events, context, bad=bad))
            return built[-1]

        return build if attribute == "factory" else lambda options, endpoint: FakeTransport()


def role_plan(
    name: str, *, kind: str = "", backends: tuple[str, ...] = (), replicas: int = 1, ranks: int = 1
) -> RolePlan:
    kind = kind or name
    record = SPECS[kind]
    chosen = tuple(
        BackendPlan(f"roles.{name}.parts.{i}", record(name=backend, factory="f:F", options="f:O"), Options())
        for i, backend in enumerate(backends or (f"fake_{name}",))
    )
    return RolePlan(name, kind, chosen, None, "lm", "cpu", replicas, ranks, False, {}, 30.0)


async def test_roles_start_in_order_and_know_where_they_are(tmp_path: Path) -> None:
    scene = Scene(tmp_path, trainer={}, generator={"replicas": 2}, reward={})
    await scene.runtime.start()
    assert scene.events == ["setup trainer0", "setup generator0", "setup generator1", "setup reward0"]
    context = scene.built["fake_generator"][1].context
    assert (context.role, context.replica, context.seed, context.device) == ("generator", 1, 5, "cpu")
    await scene.runtime.close()
    assert sorted(scene.events[4:]) == ["close generator0", "close generator1", "close reward0", "close trainer0"]
    await scene.runtime.close()
    assert len(scene.events) == 8, "closing twice closes once"


async def test_a_role_that_does_not_start_closes_the_others(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {"fake_generator": ["setup"]}, trainer={}, generator={}, reward={})
    with pytest.raises(ModelError, match="no weights in there"):
        await scene.runtime.start()
    assert scene.events == ["setup trainer0", "setup generator0", "close generator0", "close trainer0"]


async def test_what_fails_while_closing_is_told_after_everything_is_closed(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {"fake_generator": ["close"]}, trainer={}, generator={})
    await scene.runtime.start()
    with pytest.raises(ChatLearnError, match="closing failed for generator: OSError: port is gone"):
        await scene.runtime.close()
    assert "close trainer0" in scene.events


def test_several_ranks_are_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"roles\.trainer\.ranks is 2, .* Set ranks to 1, or choose a distributed"):
        Scene(tmp_path, trainer={"ranks": 2})


async def test_a_trainers_calls_run_off_the_event_loop(tmp_path: Path) -> None:
    scene = Scene(tmp_path, trainer={})
    await scene.runtime.start()
    batch: Any = object()
    group = scene.runtime.trainer("trainer")
    results = await asyncio.gather(*(group.compute(batch, OutputRequest(frozenset())) for _ in range(3)))
    assert [result["batch"] for result in results] == [batch] * 3
    [trainer] = scene.built["fake_trainer"]
    assert len(trainer.threads) == 1
    assert threading.get_ident() not in trainer.threads
    await scene.runtime.close()


async def test_after_a_sync_every_replica_serves_the_version(tmp_path: Path) -> None:
    scene = Scene(tmp_path, trainer={}, generator={"replicas": 2})
    await scene.runtime.start()
    receipts = await scene.runtime.sync_weights("trainer", "generator", 4)
    assert [(receipt.replica, receipt.state) for receipt in receipts] == [(0, "serving"), (1, "serving")]
    assert scene.runtime.generator("generator").policy_version == 4
    await scene.runtime.close()


async def test_a_replica_that_fails_a_sync_is_rebuilt_and_gets_the_weights_once_more(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {"fake_generator": ["", "sync", ""]}, trainer={}, generator={"replicas": 2})
    await scene.runtime.start()
    receipts = await scene.runtime.sync_weights("trainer", "generator", 4)
    assert [receipt.state for receipt in receipts] == ["serving", "serving"]
    assert [backend.name for backend in scene.built["fake_generator"]] == ["generator0", "generator1", "generator1"]
    assert scene.runtime.generator("generator").policy_version == 4
    await scene.runtime.close()


async def test_a_rebuilt_replica_that_fails_too_is_rebuilt_as_often_as_it_may_be(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {"fake_generator": ["sync", "sync", ""]}, trainer={}, generator={})
    await scene.runtime.start()
    [receipt] = await scene.runtime.sync_weights("trainer", "generator", 4)
    assert (receipt.state, scene.runtime.generator("generator").num_restarts) == ("serving", 2)
    await scene.runtime.close()


async def test_a_replica_that_always_fails_is_an_error(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {"fake_generator": ["sync", "sync", "sync"]}, trainer={}, generator={})
    told: list[RuntimeEvent] = []
    scene.runtime.on_event = told.append
    await scene.runtime.start()
    with pytest.raises(ReplicaLostError, match=r"2 restart\(s\), .*replica 0 of 'generator' did not take version 4"):
        await scene.runtime.sync_weights("trainer", "generator", 4)
    await scene.runtime.close()
    assert [(event.name, event.facts["restart"]) for event in told] == [("replica_rebuilt", 1), ("replica_rebuilt", 2)]


async def test_reward_parts_are_named_after_their_backend_and_numbered_where_it_repeats(tmp_path: Path) -> None:
    scene = Scene(tmp_path, reward={"backends": ("math", "judge", "judge")})
    await scene.runtime.start()
    group = scene.runtime.reward("reward")
    assert [part.name for part in group.parts] == ["math", "judge_1", "judge_2"]
    tokens = torch.zeros(1, dtype=torch.int64).numpy()
    sample = Sample("p@1#0", "p@1", Prompt("p", tokens, "?"), tokens, tokens > 0)
    [result] = await group.score([sample])
    assert result.value == 3.0
    await scene.runtime.close()


def test_describe_says_who_sits_where(tmp_path: Path) -> None:
    scene = Scene(tmp_path, trainer={}, reward={"backends": ("math", "format")})
    assert scene.runtime.describe() == {
        "trainer": {"kind": "trainer", "backend": "fake_trainer", "device": "cpu", "replicas": 1},
        "reward": {"kind": "reward", "backend": "math + format", "device": "process", "replicas": 1},
    }


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto", "roles.trainer.device") == "cpu"
    with pytest.raises(ConfigError, match=r"roles\.trainer\.device is 'cuda:1', but torch sees no CUDA device"):
        resolve_device("cuda:1", "roles.trainer.device")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto", "roles.trainer.device") == "cuda"


async def test_models_share_the_device_that_they_are_on_and_rewards_none(tmp_path: Path) -> None:
    scene = Scene(tmp_path, trainer={}, generator={"replicas": 2}, reward={})
    cpu = frozenset({Device("cpu", is_gpu=False)})
    assert scene.runtime.devices() == {"trainer": cpu, "generator": cpu}


async def test_who_is_up_is_told_before_the_next_is_built(tmp_path: Path) -> None:
    scene = Scene(tmp_path, trainer={}, generator={"replicas": 2}, reward={})

    async def role_is_up(role: str) -> None:
        scene.events.append(f"{role} is up")

    await scene.runtime.start(role_is_up)
    assert scene.events == [
        "setup trainer0",
        "trainer is up",
        "setup generator0",
        "setup generator1",
        "generator is up",
        "setup reward0",
    ]
    await scene.runtime.close()
