"""What records, options and transports say about places."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.plugins.compatibility import RoleSize
from chatlearn_core.plugins.records import GeneratorSpec, TrainerSpec, WeightSyncSpec
from chatlearn_core.runtime.plan import BackendPlan, RolePlan, RunPlan, WeightRoute
from chatlearn_ray.affinity import check_reach, engine_devices, next_to, placed_role, ranks_together
from chatlearn_ray.options import RayRuntimeOptions
from chatlearn_ray.placement import PlacedRole, PlacementPlan, place_roles

TRAINER = TrainerSpec(name="t", factory="a:b", options="a:c", parallel={"tp": "tp", "sp": "ulysses"})
GENERATOR = GeneratorSpec(
    name="g", factory="a:b", options="a:c", device_arguments=(("tensor_parallel_size", "tp_size"), ("pp_size",))
)
BOTH = ("trainer", "generator")
JOINED = RayRuntimeOptions(address="auto")


class Options(BaseModel):
    tp: int = 1
    ulysses: int | None = None


def role(
    kind: str, *, ranks: int = 1, device: str = "auto", engine: dict[str, Any] | None = None, **options: Any
) -> Any:
    record: Any = TRAINER if kind == "trainer" else GENERATOR
    backend = BackendPlan(f"roles.{kind}", record, Options(**options))
    return RolePlan(kind, kind, (backend,), None, "lm", device, 1, ranks, True, engine or {}, 60.0)


def plan(**sync: Any) -> RunPlan:
    record = WeightSyncSpec(name="broadcast", sender="a:b", receiver="a:b", options="a:c", **sync)
    flow = WeightRoute("trainer", "generator", record, Options(), "", "barrier", 1, 1.0)
    roles = {"trainer": role("trainer"), "generator": role("generator")}
    registry: Any = None
    return RunPlan(registry, roles, (flow,), Path(), 0)


@pytest.mark.parametrize(
    ("engine", "devices"),
    [({}, None), ({"tp_size": 4}, 4), ({"tensor_parallel_size": 2, "pp_size": 3}, 6), ({"max_num_seqs": 9}, None)],
)
def test_an_engines_devices_are_the_product_of_its_arguments(engine: dict[str, Any], devices: int | None) -> None:
    assert engine_devices(role("generator", engine=engine)) == devices
    assert placed_role(role("generator", engine=engine), plan(), JOINED, gpus=True).devices_per_worker == (devices or 1)


def test_ranks_and_engine_arguments_must_agree() -> None:
    assert engine_devices(role("generator", ranks=4, engine={"tp_size": 4})) == 4
    with pytest.raises(ConfigError, match=r"roles\.generator\.ranks is 3.*engine uses 4 \(tp_size 2 x pp_size 2\)"):
        engine_devices(role("generator", ranks=3, engine={"tp_size": 2, "pp_size": 2}))
    with pytest.raises(ConfigError, match=r"engine\.tp_size is 'two'; it must be a whole number"):
        engine_devices(role("generator", engine={"tp_size": "two"}))


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, (1, "")), ({"tp": 4, "ulysses": 2}, (8, "tp 4, sp 2")), ({"ulysses": 2}, (2, "sp 2"))],
)
def test_ranks_belong_together_as_the_trainers_options_say(options: dict[str, int], expected: tuple[int, str]) -> None:
    assert ranks_together(role("trainer", ranks=8, **options)) == expected


def test_a_generator_belongs_next_to_the_trainer_of_its_weights() -> None:
    generator = role("generator")
    near, why = next_to(generator, plan(), JOINED)
    assert (near, "'broadcast' moves weights between them" in why) == ("trainer", True)
    assert next_to(generator, plan(channels=("checkpoint",)), JOINED) == (None, ""), "files are everywhere as near"
    assert next_to(generator, plan(), RayRuntimeOptions()) == (None, ""), "one machine has one node"
    assert next_to(role("trainer"), plan(), JOINED) == (None, "")


def test_a_gpu_that_ray_must_choose_is_not_named() -> None:
    with pytest.raises(ConfigError, match=r"roles\.trainer\.device is 'cuda:1'"):
        placed_role(role("trainer", device="cuda:1"), plan(), JOINED, gpus=True)


def test_a_transport_within_a_host_needs_both_ends_on_one() -> None:
    [sync] = plan(reach="host").weight_syncs

    def check(options: RayRuntimeOptions) -> None:
        roles = [replace(placed_role(r, plan(), options, gpus=False)) for r in plan().roles.values()]
        check_reach(sync, place_roles(roles, options), options)

    check(RayRuntimeOptions())
    with pytest.raises(ConfigError, match=r"'broadcast' works within one host, but the places of 'trainer' and 'gen"):
        check(JOINED)
    pool = {"address": "auto", "pools": {"p": {"slots": 2, "strategy": "one_node"}}}
    shared = RayRuntimeOptions.model_validate(pool | {"roles": {"trainer": {"pool": "p"}, "generator": {"pool": "p"}}})
    check(shared)
    assert (shared.placement, JOINED.placement, RayRuntimeOptions().placement) == ("host", "anywhere", "host")
    half = RayRuntimeOptions.model_validate(pool | {"roles": {"trainer": {"pool": "p"}, "reward": {"pool": "p"}}})
    assert half.placement == "host"
    with pytest.raises(ConfigError, match="works within one host"):
        check(half)


GIVEN = {"slots": 1, "gpus": 2}


@pytest.mark.parametrize(
    ("options", "device"),
    [
        ({}, "cpu"),
        ({"pools": {"p": GIVEN}, "roles": {"trainer": {"pool": "p"}}}, "cuda"),
        ({"pools": {"p": {"slots": 1}}, "roles": {"trainer": {"pool": "p"}}}, "cpu"),
        ({"roles": {"trainer": {"gpus": 0.5}}}, "cuda"),
        ({"pools": {"p": GIVEN}, "roles": {"trainer": {"pool": "p", "gpus": 0}}}, "cpu"),
    ],
    ids=["nothing said", "pool with GPUs", "pool without", "a share", "none of the pool's"],
)
def test_auto_is_a_gpu_for_a_role_with_gpus_before_the_cluster_is_known(options: dict[str, Any], device: str) -> None:
    made = placed_role(role("trainer"), plan(), RayRuntimeOptions.model_validate(options), gpus=False)
    assert made.device == device


POOL_OF_NODES = {"slots": 2, "gpus": 8, "cpus": 32}


@pytest.mark.parametrize(
    ("pools", "placements", "trainer", "generator", "placement"),
    [
        # two nodes of eight GPUs: a replica of two GPUs is beside ranks wherever it sits
        ({"nodes": POOL_OF_NODES}, ({"pool": "nodes"}, {"pool": "nodes"}), {"ranks": 16}, {"replicas": 8}, "hosts"),
        # the trainer is on the first node only
        ({"nodes": POOL_OF_NODES}, ({"pool": "nodes"}, {"pool": "nodes"}), {"ranks": 8}, {"replicas": 8}, "anywhere"),
        # a replica in each of the last four slots of eight, a rank in each
        (
            {"gpus": {"slots": 8, "gpus": 1}},
            ({"pool": "gpus"}, {"pool": "gpus", "first_slot": 4}),
            {"ranks": 8},
            {"replicas": 4, "devices": 1},
            "hosts",
        ),
        (
            {"gpus": {"slots": 8, "gpus": 1}},
            ({"pool": "gpus"}, {"pool": "gpus", "first_slot": 4}),
            {"ranks": 6},
            {"replicas": 4, "devices": 1},
            "anywhere",
        ),
        (
            {"gpus": {"slots": 8, "gpus": 1, "strategy": "one_node"}},
            ({"pool": "gpus"}, {"pool": "gpus"}),
            {"ranks": 4},
            {"replicas": 8, "devices": 1},
            "host",
        ),
        ({"a": POOL_OF_NODES, "b": POOL_OF_NODES}, ({"pool": "a"}, {"pool": "b"}), {"ranks": 16}, {}, "anywhere"),
        ({}, ({}, {}), {"ranks": 2}, {}, "anywhere"),
        # more ranks than GPUs: what is wrong is told when the run is planned
        ({"nodes": POOL_OF_NODES}, ({"pool": "nodes"}, {"pool": "nodes"}), {"ranks": 99}, {}, "anywhere"),
    ],
)
def test_replicas_in_slots_with_ranks_are_beside_them_on_every_node(
    pools: Any, placements: Any, trainer: dict[str, int], generator: dict[str, int], placement: str
) -> None:
    options = RayRuntimeOptions.model_validate(
        {"address": "auto", "pools": pools, "roles": {"trainer": placements[0], "generator": placements[1]}}
    )
    sizes = {
        kind: RoleSize(kind, kind, "auto", **({"replicas": 1, "ranks": 1, "devices": devices} | given))
        for kind, devices, given in (("trainer", 1, trainer), ("generator", 2, generator))
    }
    assert options.placement_between(sizes["trainer"], sizes["generator"]) == placement


def test_a_transport_within_hosts_reaches_over_nodes_where_every_replica_is_beside_ranks() -> None:
    options = RayRuntimeOptions.model_validate(
        {
            "address": "auto",
            "pools": {"gpus": {"slots": 4, "gpus": 1}},
            "roles": {name: {"pool": "gpus"} for name in BOTH},
        }
    )

    def plan_for(ranks: int) -> PlacementPlan:
        sizes = {"trainer": {"replicas": 1, "ranks": ranks}, "generator": {"replicas": 4, "ranks": 1}}
        return place_roles([PlacedRole(name, name, "cuda", **size) for name, size in sizes.items()], options)

    [sync] = plan(reach="host", within_hosts=True).weight_syncs
    check_reach(sync, plan_for(4), options)
    with pytest.raises(ConfigError, match="let every replica of the generator sit in a slot with ranks of"):
        check_reach(sync, plan_for(3), options)
    [elsewhere] = plan(reach="host").weight_syncs
    with pytest.raises(ConfigError, match="works within one host"):
        check_reach(elsewhere, plan_for(4), options)


def test_a_trainers_layout_is_its_ranks_by_dimension() -> None:
    """8 ranks: what the other dimensions leave is data parallelism; a size that is no number says nothing."""
    assert role("trainer", ranks=8, tp=2, ulysses=2).parallel == {"dp": 2, "tp": 2, "sp": 2}
    assert role("trainer", ranks=8, ulysses=None).parallel == {"dp": 8}
    assert role("trainer").parallel == {}
