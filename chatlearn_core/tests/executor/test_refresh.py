"""Roles that follow another one: when, in which order, and what is left behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from chatlearn_core.executor.colocation import ColocationManager
from chatlearn_core.executor.planning import _with_route
from chatlearn_core.executor.refresh import RoleRefresher
from chatlearn_core.metrics import Timers
from chatlearn_core.plugins.records import RuntimeSpec, TrainerSpec, WeightSyncSpec
from chatlearn_core.protocols import ModelSource
from chatlearn_core.runtime.plan import BackendPlan, Refresh, RolePlan, WeightRoute

ROLES = {"policy": None, "reference": Refresh("policy", 2, 0.5), "old": Refresh("policy", 3, 0.0), "critic": None}


class TransportOptions(BaseModel):
    """What ``weight_sync.options`` may hold for the transport that is taken."""

    depth: int = 1


def role(name: str, refresh: Refresh | None) -> RolePlan:
    model = ModelSource(f"models/{name}", f"models/{name}")
    return RolePlan(name, "trainer", (), model, "lm", "cpu", 1, 1, refresh is None, {}, 60.0, refresh)


class Group:
    """Notes what is asked of it; ``export_model`` writes a file."""

    def __init__(self, name: str, calls: list[tuple[Any, ...]]) -> None:
        self.name, self.calls = name, calls

    async def export_model(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        (directory / "weights").write_text(self.name)
        self.calls.append(("export", self.name))

    async def load_model(self, directory: Path, *, decay: float = 0.0) -> None:
        if self.name == "old" and self.fails:
            raise RuntimeError("another model")
        source = (directory / "weights").read_text() if directory.exists() else str(directory)
        self.calls.append(("load", self.name, source, decay))

    fails = False


class Syncing:
    """A runtime that can bring weights to ``takes`` over a route, and notes what it is asked for."""

    def __init__(self, groups: dict[str, Group], calls: list[tuple[Any, ...]], takes: set[str]) -> None:
        self.trainer, self.devices = groups.__getitem__, dict
        self.calls, self.takes = calls, takes

    async def refresh_weights(self, trainer: str, follower: str, step: int) -> bool:
        if follower in self.takes:
            self.calls.append(("sync", trainer, follower, step))
        return follower in self.takes


@pytest.fixture
def made(tmp_path: Path) -> tuple[RoleRefresher, list[tuple[Any, ...]], dict[str, Group]]:
    calls: list[tuple[Any, ...]] = []
    groups = {name: Group(name, calls) for name in ROLES}
    runtime: Any = SimpleNamespace(trainer=lambda name: groups[name], devices=dict)
    roles = {name: role(name, refresh) for name, refresh in ROLES.items()}
    return RoleRefresher(runtime, roles, ColocationManager(runtime), tmp_path / "refresh"), calls, groups


async def test_each_role_follows_in_its_own_time_and_a_source_exports_once(made: Any, tmp_path: Path) -> None:
    refresher, calls, _ = made
    assert refresher.roles == ("reference", "old")
    found = [await refresher.refresh(step, Timers()) for step in range(1, 7)]
    reference, old = ("load", "reference", "policy", 0.5), ("load", "old", "policy", 0.0)
    export = ("export", "policy")
    assert calls == [export, reference, export, old, export, reference, export, reference, old]
    assert [metrics.get("training/refreshed_roles") is not None for metrics in found] == [
        False,
        *[True] * 3,
        False,
        True,
    ]
    assert not list((tmp_path / "refresh").iterdir()), "nothing is left on the disk"


@pytest.mark.parametrize("takes", [{"reference", "old"}, {"reference"}, set()])
async def test_a_role_with_a_route_follows_by_weight_sync_and_else_over_a_disk(tmp_path: Path, takes: set[str]) -> None:
    calls: list[tuple[Any, ...]] = []
    runtime: Any = Syncing({name: Group(name, calls) for name in ROLES}, calls, takes)
    spec = WeightSyncSpec(name="near", sender="a:S", receiver="a:R", options="a:O")
    roles = {name: role(name, refresh) for name, refresh in ROLES.items()}
    for name in ("reference", "old"):
        route = WeightRoute("policy", name, spec, TransportOptions(), "test", "barrier", 1 << 20, 30.0)
        refresh = roles[name].refresh
        assert refresh is not None
        roles[name] = replace(roles[name], refresh=replace(refresh, route=route))
    refresher = RoleRefresher(runtime, roles, ColocationManager(runtime), tmp_path / "refresh")
    metrics = await refresher.refresh(6, Timers())
    synced = [("sync", "policy", name, 6) for name in ("reference", "old") if name in takes]
    loads = [("load", "reference", "policy", 0.5), ("load", "old", "policy", 0.0)]
    loaded = [load for load in loads if load[1] not in takes]
    assert calls == synced + ([("export", "policy"), *loaded] if loaded else [])
    assert metrics["training/refreshed_roles"].total == 2


TRAINER = TrainerSpec(name="one", factory="a:b", options="a:c", channels=frozenset({"tensors"}))
NEAR = WeightSyncSpec(name="near", sender="a:S", receiver="a:R", options="a:O", reach="process", speed_rank=1)
FAR = WeightSyncSpec(name="far", sender="a:S", receiver="a:R", options="a:O", speed_rank=2)
FILES = WeightSyncSpec(name="files", sender="a:S", receiver="a:R", options="a:O", channels=("checkpoint",))
RUNTIME = RuntimeSpec(name="here", factory="a:b", options="a:c", refreshes=True)


def planned(
    *, runtime: RuntimeSpec = RUNTIME, taker: TrainerSpec = TRAINER, named: Any = None, head: Any = "lm"
) -> Refresh:
    """The refresh of a role with head ``head`` from one with head ``lm``."""
    source, follower = role("policy", None), role("reference", Refresh("policy", 2, 0.5))
    source = replace(source, backends=(BackendPlan("roles.policy", TRAINER, TransportOptions()),))
    follower = replace(follower, backends=(BackendPlan("roles.reference", taker, TransportOptions()),), head=head)
    settings = SimpleNamespace(export="auto", bucket_mb=3, timeout_s=7.0, options={"depth": 4, "of_another": 1})
    loaded: Any = SimpleNamespace(
        config=SimpleNamespace(weight_sync=settings),
        plugin=lambda key: SimpleNamespace(record=runtime, options=None),
        chosen=lambda key: None if named is None else SimpleNamespace(record=named),
    )
    registry: Any = SimpleNamespace(
        records=lambda kind: [FILES, FAR, NEAR], load_options=lambda record: TransportOptions
    )
    assert follower.refresh is not None
    return _with_route(loaded, registry, source, follower, follower.refresh)


@pytest.mark.parametrize(
    ("changes", "transport"),
    [
        ({}, "near"),
        ({"named": FAR}, "far"),
        ({"named": FILES}, "near"),
        ({"runtime": replace(RUNTIME, placement="anywhere")}, "far"),
    ],
)
def test_a_refresh_takes_the_named_transport_if_it_suits_and_else_the_fastest(changes: Any, transport: str) -> None:
    refresh = planned(**changes)
    assert refresh.route is not None
    assert refresh.route.record.name == transport
    assert (refresh.route.trainer, refresh.route.target) == ("policy", "reference")
    assert (refresh.route.bucket_bytes, refresh.route.timeout_s) == (3 << 20, 7.0)
    assert refresh.route.options == TransportOptions(depth=4)
    assert (refresh.every, refresh.decay) == (2, 0.5)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"runtime": replace(RUNTIME, refreshes=False)}, "runtime 'here' connects no trainers"),
        ({"taker": replace(TRAINER, channels=frozenset())}, "trainer 'one' takes weights from model directories only"),
        ({"head": "value"}, "'policy' has head 'lm' and 'reference' has head 'value'"),
        ({"taker": replace(TRAINER, channels=frozenset({"boxes"}))}, "No weight sync fits trainer 'one'"),
    ],
)
def test_what_no_route_can_bring_goes_as_a_model_directory(changes: Any, why: str) -> None:
    refresh = planned(**changes)
    assert refresh.route is None
    assert refresh.why_directory.startswith(why)


async def test_what_a_killed_run_left_is_not_mixed_in(made: Any, tmp_path: Path) -> None:
    refresher, calls, groups = made
    (tmp_path / "refresh" / "policy").mkdir(parents=True)
    await refresher.refresh(2, Timers())
    assert calls[-1] == ("load", "reference", "policy", 0.5)
    groups["old"].fails = True
    with pytest.raises(RuntimeError, match="another model"):
        await refresher.refresh(3, Timers())
    assert not list((tmp_path / "refresh").iterdir()), "nothing is left after a failure"


async def test_going_back_to_the_beginning_undoes_what_was_learned_and_followed(made: Any) -> None:
    refresher, calls, _ = made
    await refresher.begin_anew(["policy", "critic"], Timers())
    assert calls == [("load", name, f"models/{name}", 0.0) for name in ("policy", "critic", "reference", "old")]
