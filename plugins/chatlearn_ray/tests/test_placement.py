from __future__ import annotations

from typing import Any

import pytest

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.plugins.compatibility import RoleSize
from chatlearn_ray.options import RayRuntimeOptions
from chatlearn_ray.placement import PlacedRole, PlacementPlan, place_roles

TRAINER = PlacedRole("trainer", "trainer", "cuda", 1, 4)
GENERATOR = PlacedRole("generator", "generator", "cuda", 2, 2)
REWARD = PlacedRole("reward", "reward", "auto", 1, 1)


def place(*roles: PlacedRole, **options: object) -> PlacementPlan:
    return place_roles(roles, RayRuntimeOptions.model_validate(options))


def places(placement_plan: PlacementPlan, role: str) -> list[tuple[str, int, dict[str, float]]]:
    return [(s.group, s.bundle, dict(s.amounts)) for s in placement_plan.of(role)]


def test_without_pools_every_role_has_places_of_its_own() -> None:
    placement_plan = place(TRAINER, GENERATOR, REWARD)
    assert places(placement_plan, "trainer") == [("role 'trainer'", i, {"CPU": 1.0, "GPU": 1.0}) for i in range(4)]
    # a generator's process drives both ranks of its engine
    assert places(placement_plan, "generator")[1] == ("role 'generator', replica 1", 0, {"CPU": 1.0, "GPU": 2.0})
    assert places(placement_plan, "reward") == [("role 'reward', replica 0", 0, {"CPU": 1.0})]
    assert dict(placement_plan.total) == {"CPU": 4 + 2 + 1, "GPU": 4 + 2 * 2}


def test_roles_in_one_pool_share_its_slots() -> None:
    generator = PlacedRole("generator", "generator", "cuda", 4, 1)
    placement_plan = place(
        TRAINER,
        generator,
        pools={"gpus": {"slots": 4, "gpus": 1}},
        roles={"trainer": {"pool": "gpus"}, "generator": {"pool": "gpus"}},
    )
    assert places(placement_plan, "trainer") == [("pool 'gpus'", i, {"CPU": 0.5, "GPU": 0.5}) for i in range(4)]
    assert places(placement_plan, "generator") == places(placement_plan, "trainer")
    assert dict(placement_plan.total) == {"CPU": 4.0, "GPU": 4.0}


def test_roles_may_share_a_part_of_a_pool() -> None:
    generator = PlacedRole("generator", "generator", "cuda", 2, 1)
    placement_plan = place(
        TRAINER,
        generator,
        pools={"gpus": {"slots": 4, "gpus": 1}},
        roles={"trainer": {"pool": "gpus"}, "generator": {"pool": "gpus", "first_slot": 2, "gpus": 0.25, "cpus": 0.5}},
    )
    assert [bundle for _, bundle, _ in places(placement_plan, "generator")] == [2, 3]
    assert places(placement_plan, "generator")[0][2] == {"CPU": 0.5, "GPU": 0.25}
    assert places(placement_plan, "trainer")[0][2] == {"CPU": 0.5, "GPU": 0.5}


def test_a_cpu_role_in_a_gpu_pool_takes_no_gpu() -> None:
    placement_plan = place(
        TRAINER,
        REWARD,
        pools={"gpus": {"slots": 4, "gpus": 1, "cpus": 2}},
        roles={"trainer": {"pool": "gpus"}, "reward": {"pool": "gpus"}},
    )
    assert places(placement_plan, "reward")[0][2] == {"CPU": 1.0}
    assert places(placement_plan, "trainer")[0][2] == {"CPU": 1.0, "GPU": 1.0}


def test_three_equal_shares_do_not_exceed_the_whole() -> None:
    names = [PlacedRole(name, "trainer", "cuda", 1, 1) for name in ("a", "b", "c")]
    placement_plan = place(
        *names, pools={"one": {"slots": 1, "gpus": 1}}, roles={role.name: {"pool": "one"} for role in names}
    )
    assert sum(s.amounts["GPU"] for s in placement_plan.placements) <= 1.0


def test_an_overfull_slot_is_refused_with_the_sum() -> None:
    with pytest.raises(ConfigError, match=r"slot 0 of pool 'p' has 1 GPU.*trainer 1 \+ generator 0.5 = 1.5"):
        place(
            PlacedRole("trainer", "trainer", "cuda", 1, 1),
            PlacedRole("generator", "generator", "cuda", 1, 1),
            pools={"p": {"slots": 1, "gpus": 1}},
            roles={"trainer": {"pool": "p", "gpus": 1}, "generator": {"pool": "p", "gpus": 0.5}},
        )


def test_a_pool_with_too_few_slots_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'trainer' has 4 worker\(s\) from slot 1 on, which needs 5 slots.*has 4"):
        place(TRAINER, pools={"p": {"slots": 4, "gpus": 1}}, roles={"trainer": {"pool": "p", "first_slot": 1}})


def test_an_unused_pool_is_not_reserved() -> None:
    assert dict(place(REWARD, pools={"gpus": {"slots": 4, "gpus": 1}}).total) == {"CPU": 1.0}


def test_consecutive_ranks_that_belong_together_share_a_bundle() -> None:
    trainer = PlacedRole("trainer", "trainer", "cuda", 1, 4, together=2, together_why="ulysses 2")
    placement_plan = place(trainer)
    assert [dict(bundle) for bundle in placement_plan.groups[0].bundles] == [{"CPU": 2.0, "GPU": 2.0}] * 2
    assert places(placement_plan, "trainer") == [("role 'trainer'", i // 2, {"CPU": 1.0, "GPU": 1.0}) for i in range(4)]
    assert placement_plan.why("trainer") == ["every 2 ranks of 'trainer' on one node (ulysses 2)"]


@pytest.mark.parametrize(("together", "bundles"), [(4, 1), (1, 4)])
def test_a_setting_overrides_the_rule(together: int, bundles: int) -> None:
    trainer = PlacedRole("trainer", "trainer", "cuda", 1, 4, together=2, together_why="ulysses 2")
    placement_plan = place(trainer, roles={"trainer": {"together": together}})
    assert len(placement_plan.groups[0].bundles) == bundles
    assert placement_plan.why("trainer") == (
        ["every 4 ranks of 'trainer' on one node (runtime.options.roles.trainer.together)"] if together > 1 else []
    )


def test_an_engine_gets_the_devices_of_its_arguments() -> None:
    engine = PlacedRole("generator", "generator", "cuda", 1, 1, devices=4)
    assert places(place(engine), "generator")[0][2] == {"CPU": 1.0, "GPU": 4.0}


NEAR = PlacedRole("generator", "generator", "cuda", 2, 1, near="trainer", near_why="'broadcast' moves weights")


@pytest.mark.parametrize("order", [(TRAINER, NEAR), (NEAR, TRAINER)])
def test_a_generator_joins_the_group_of_its_trainer(order: tuple[PlacedRole, PlacedRole]) -> None:
    placement_plan = place(*order, REWARD)
    name = "role 'trainer' and 'generator'"
    assert [group.name for group in placement_plan.groups if "trainer" in group.name] == [name]
    assert [bundle for _, bundle, _ in places(placement_plan, "trainer")] == [0, 1, 2, 3]
    assert [(group, bundle) for group, bundle, _ in places(placement_plan, "generator")] == [(name, 4), (name, 5)]
    assert places(placement_plan, "reward")[0][:2] == ("role 'reward', replica 0", 0)
    assert placement_plan.why("generator") == ["'generator' near 'trainer' ('broadcast' moves weights)"]
    assert dict(placement_plan.total) == {"CPU": 7.0, "GPU": 6.0}


@pytest.mark.parametrize(
    "wanted", [{"near": "none"}, {"one_node": True}, {"pool": "p"}], ids=["none", "one_node", "pool"]
)
def test_a_generator_stays_where_the_configuration_puts_it(wanted: dict[str, object]) -> None:
    placement_plan = place(TRAINER, NEAR, roles={"generator": wanted}, pools={"p": {"slots": 2, "gpus": 1}})
    assert all("trainer" not in group for group, _, _ in places(placement_plan, "generator"))


def test_a_role_may_be_put_next_to_any_other() -> None:
    placement_plan = place(TRAINER, REWARD, roles={"reward": {"near": "trainer"}})
    assert places(placement_plan, "reward")[0][:2] == ("role 'trainer' and 'reward'", 4)
    assert placement_plan.why("reward") == ["'reward' near 'trainer' (runtime.options.roles.reward.near)"]


def devices(placement_plan: PlacementPlan, role: str) -> set[tuple[str, bool]]:
    return {(device.place, device.is_gpu) for placement in placement_plan.of(role) for device in placement.devices}


def test_fractions_of_a_slots_gpu_are_shared_and_whole_gpus_are_not() -> None:
    generator = PlacedRole("generator", "generator", "cuda", 2, 1)
    placement_plan = place(
        TRAINER,
        generator,
        pools={"gpus": {"slots": 4, "gpus": 1}},
        roles={"trainer": {"pool": "gpus"}, "generator": {"pool": "gpus", "first_slot": 2}},
    )
    shared = {("pool 'gpus', slot 2", True), ("pool 'gpus', slot 3", True)}
    assert devices(placement_plan, "generator") == shared
    assert devices(placement_plan, "trainer") & devices(placement_plan, "generator") == shared
    alone = place(TRAINER, generator)
    assert not devices(alone, "trainer") & devices(alone, "generator")
    assert len(devices(alone, "trainer")) == 4


def test_on_the_host_roles_of_one_slot_share_its_memory_but_not_with_those_on_its_gpu() -> None:
    reference = PlacedRole("reference", "trainer", "cpu", 1, 1)
    critic = PlacedRole("critic", "trainer", "cpu", 1, 1)
    actor = PlacedRole("trainer", "trainer", "cuda", 1, 1)
    roles = {name: {"pool": "mixed"} for name in ("reference", "critic", "trainer")}
    placement_plan = place(reference, critic, actor, pools={"mixed": {"slots": 1, "gpus": 1}}, roles=roles)
    assert (
        devices(placement_plan, "reference") == devices(placement_plan, "critic") == {("pool 'mixed', slot 0", False)}
    )
    assert not devices(placement_plan, "trainer") & devices(placement_plan, "critic")


# ------------------------------------------------------------------------------------------ slots with several GPUs

ENGINE = PlacedRole("generator", "generator", "cuda", 2, 1, devices=2)
NODES = {"nodes": {"slots": 1, "gpus": 4, "cpus": 8}}


def gpus(placement_plan: PlacementPlan, role: str) -> list[tuple[int, tuple[int, ...]]]:
    """(slot, its GPUs) of every worker."""
    return [(placement.bundle, placement.gpus) for placement in placement_plan.of(role)]


def in_nodes(**roles: dict[str, object]) -> dict[str, object]:
    return {name: {"pool": "nodes", **placement} for name, placement in roles.items()}


def test_an_engine_of_two_gpus_shares_them_with_the_ranks_on_each() -> None:
    placement_plan = place(TRAINER, ENGINE, pools=NODES, roles=in_nodes(trainer={}, generator={}))
    assert gpus(placement_plan, "trainer") == [(0, (0,)), (0, (1,)), (0, (2,)), (0, (3,))]
    assert gpus(placement_plan, "generator") == [(0, (0, 1)), (0, (2, 3))]
    assert devices(placement_plan, "trainer") == {(f"pool 'nodes', slot 0, GPU {gpu}", True) for gpu in range(4)}
    assert devices(placement_plan, "generator") == devices(placement_plan, "trainer")
    assert places(placement_plan, "trainer")[0] == ("pool 'nodes'", 0, {"CPU": 1.0}), "Ray is asked for no GPU"
    assert places(placement_plan, "generator")[0] == ("pool 'nodes'", 0, {"CPU": 2.0})
    assert dict(placement_plan.total) == {"CPU": 8.0, "GPU": 4.0}, "the slot reserves them"
    assert placement_plan.of("trainer")[2].text == "pool 'nodes', slot 0: 1 CPU, its GPU 2"
    assert placement_plan.of("generator")[1].text == "pool 'nodes', slot 0: 2 CPU, its GPUs 2 and 3"


def test_several_slots_are_filled_one_after_the_other() -> None:
    pools = {"nodes": {"slots": 2, "gpus": 2}}
    placement_plan = place(TRAINER, ENGINE, pools=pools, roles=in_nodes(trainer={}, generator={}))
    assert gpus(placement_plan, "trainer") == [(0, (0,)), (0, (1,)), (1, (0,)), (1, (1,))]
    assert gpus(placement_plan, "generator") == [(0, (0, 1)), (1, (0, 1))]


def test_an_engine_may_share_a_part_of_the_trainers_gpus() -> None:
    pools = {"nodes": {"slots": 2, "gpus": 2}}
    one = PlacedRole("generator", "generator", "cuda", 1, 1, devices=2)
    placement_plan = place(TRAINER, one, pools=pools, roles=in_nodes(trainer={}, generator={"first_slot": 1}))
    assert devices(placement_plan, "generator") == {(f"pool 'nodes', slot 1, GPU {gpu}", True) for gpu in range(2)}
    assert devices(placement_plan, "generator") < devices(placement_plan, "trainer")


def test_roles_that_fit_beside_one_another_in_a_slot_do_not_share() -> None:
    trainer = PlacedRole("trainer", "trainer", "cuda", 1, 2)
    one = PlacedRole("generator", "generator", "cuda", 1, 1, devices=2)
    placement_plan = place(trainer, one, pools=NODES, roles=in_nodes(trainer={}, generator={}))
    assert gpus(placement_plan, "trainer") == [(0, (0,)), (0, (1,))]
    assert gpus(placement_plan, "generator") == [(0, (2, 3))]


def test_workers_a_slot_may_be_fewer_than_it_has_gpus_for() -> None:
    pools = {"nodes": {"slots": 4, "gpus": 2, "cpus": 8}}
    placement_plan = place(TRAINER, pools=pools, roles=in_nodes(trainer={"per_slot": 1}))
    assert gpus(placement_plan, "trainer") == [(slot, (0,)) for slot in range(4)]


def test_a_worker_on_the_host_drives_no_gpu_of_its_slot() -> None:
    placement_plan = place(TRAINER, REWARD, pools=NODES, roles=in_nodes(trainer={}, reward={}))
    assert gpus(placement_plan, "reward") == [(0, ())]
    assert placement_plan.of("reward")[0].text == "pool 'nodes', slot 0: 4 CPU"


def test_a_reward_has_its_gpu_alone_because_it_takes_no_turns() -> None:
    trainer = PlacedRole("trainer", "trainer", "cuda", 1, 2)
    one = PlacedRole("generator", "generator", "cuda", 1, 1, devices=2)
    asked = in_nodes(trainer={}, generator={}, reward={"gpus": 1})
    placement_plan = place(trainer, one, REWARD, pools=NODES, roles=asked)
    assert gpus(placement_plan, "reward") == [(0, (3,))]
    assert gpus(placement_plan, "trainer") == [(0, (0,)), (0, (1,))]
    assert gpus(placement_plan, "generator") == [(0, (0, 1))]
    with pytest.raises(
        ConfigError, match=r"drive 1 GPU\(s\) each = 4, but the slot has 4, of which reward has 1 alone"
    ):
        place(TRAINER, REWARD, pools=NODES, roles=in_nodes(trainer={}, reward={"gpus": 1}))


def test_a_slot_with_fewer_gpus_than_an_engine_drives_is_refused() -> None:
    four = PlacedRole("generator", "generator", "cuda", 2, 1, devices=4)
    for slot, engine in ((1, ENGINE), (2, four)):
        told = rf"drives {engine.devices} GPU\(s\), but a slot of pool 'p' has {slot} \(.* Raise it to {engine.devices}"
        with pytest.raises(ConfigError, match=told):
            place(engine, pools={"p": {"slots": 2, "gpus": slot}}, roles={"generator": {"pool": "p"}})


def test_more_ranks_than_gpus_are_refused() -> None:
    eight = PlacedRole("trainer", "trainer", "cuda", 1, 8)
    with pytest.raises(ConfigError, match=r"has 8 worker\(s\) from slot 0 on, which needs 2 slots \(4 a slot\)"):
        place(eight, pools=NODES, roles=in_nodes(trainer={}))
    with pytest.raises(
        ConfigError, match=r"8 worker\(s\) in slot 0 .* drive 1 GPU\(s\) each = 8, but .* has 4\. Raise"
    ):
        place(eight, pools=NODES, roles=in_nodes(trainer={"per_slot": 8}))


@pytest.mark.parametrize("asked", [0.5, 1], ids=["a fraction", "fewer than it drives"])
def test_a_share_that_is_no_use_is_refused(asked: float) -> None:
    with pytest.raises(ConfigError, match=r"roles\.generator\.gpus is [\d.]+, but .* drives whole GPUs, 2 of them"):
        place(ENGINE, pools=NODES, roles=in_nodes(generator={"gpus": asked}))


def test_a_slot_has_whole_gpus_if_it_has_several() -> None:
    with pytest.raises(ConfigError, match=r"pools\.nodes\.gpus is 2\.5; a slot with several GPUs needs a whole number"):
        place(TRAINER, pools={"nodes": {"slots": 4, "gpus": 2.5}}, roles=in_nodes(trainer={}))


def test_a_role_on_gpus_in_a_pool_without_them_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'trainer' is to run on a GPU, but the slots of pool 'p' have none"):
        place(TRAINER, pools={"p": {"slots": 4}}, roles={"trainer": {"pool": "p"}})


@pytest.mark.parametrize(
    ("pools", "trainer", "generator", "expected"),
    [
        ({"p": {"slots": 4, "gpus": 1}}, {"pool": "p"}, {"pool": "p"}, True),
        ({"p": {"slots": 1, "gpus": 4}}, {"pool": "p"}, {"pool": "p"}, True),
        ({"p": {"slots": 8, "gpus": 1}}, {"pool": "p"}, {"pool": "p", "first_slot": 4}, False),
        ({"p": {"slots": 4, "gpus": 1}, "q": {"slots": 4, "gpus": 1}}, {"pool": "p"}, {"pool": "q"}, False),
        ({"p": {"slots": 4, "cpus": 2}}, {"pool": "p"}, {"pool": "p"}, False),
        ({}, {}, {}, False),
    ],
    ids=["fractions", "divided slot", "other slots", "other pools", "no GPUs", "places of their own"],
)
def test_two_roles_are_sure_to_share_gpus_in_the_same_slots_alone(
    pools: dict[str, Any], trainer: dict[str, Any], generator: dict[str, Any], expected: bool
) -> None:
    options = RayRuntimeOptions.model_validate({"pools": pools, "roles": {"trainer": trainer, "generator": generator}})
    sizes = RoleSize("trainer", "trainer", "auto", 1, 4, 1), RoleSize("generator", "generator", "auto", 4, 1, 1)
    assert options.same_gpus_between(*sizes) is expected
    assert not options.same_gpus_between(sizes[0], RoleSize("generator", "generator", "cpu", 4, 1, 1))
