from __future__ import annotations

import pytest

from chatlearn_core.exceptions import ConfigError
from chatlearn_ray.options import RayRuntimeOptions
from chatlearn_ray.seating import SeatedRole, Seating, seat_roles

TRAINER = SeatedRole("trainer", "trainer", "cuda", 1, 4)
GENERATOR = SeatedRole("generator", "generator", "cuda", 2, 2)
REWARD = SeatedRole("reward", "reward", "auto", 1, 1)


def seat(*roles: SeatedRole, **options: object) -> Seating:
    return seat_roles(roles, RayRuntimeOptions.model_validate(options))


def places(seating: Seating, role: str) -> list[tuple[str, int, dict[str, float]]]:
    return [(s.group, s.bundle, dict(s.amounts)) for s in seating.of(role)]


def test_without_pools_every_role_has_places_of_its_own() -> None:
    seating = seat(TRAINER, GENERATOR, REWARD)
    assert places(seating, "trainer") == [("role 'trainer'", i, {"CPU": 1.0, "GPU": 1.0}) for i in range(4)]
    # a generator's process drives both ranks of its engine
    assert places(seating, "generator")[1] == ("role 'generator', replica 1", 0, {"CPU": 1.0, "GPU": 2.0})
    assert places(seating, "reward") == [("role 'reward', replica 0", 0, {"CPU": 1.0})]
    assert dict(seating.total) == {"CPU": 4 + 2 + 1, "GPU": 4 + 2 * 2}


def test_roles_in_one_pool_share_its_slots() -> None:
    generator = SeatedRole("generator", "generator", "cuda", 4, 1)
    seating = seat(
        TRAINER,
        generator,
        pools={"gpus": {"slots": 4, "gpus": 1}},
        roles={"trainer": {"pool": "gpus"}, "generator": {"pool": "gpus"}},
    )
    assert places(seating, "trainer") == [("pool 'gpus'", i, {"CPU": 0.5, "GPU": 0.5}) for i in range(4)]
    assert places(seating, "generator") == places(seating, "trainer")
    assert dict(seating.total) == {"CPU": 4.0, "GPU": 4.0}


def test_roles_may_share_a_part_of_a_pool() -> None:
    generator = SeatedRole("generator", "generator", "cuda", 2, 1)
    seating = seat(
        TRAINER,
        generator,
        pools={"gpus": {"slots": 4, "gpus": 1}},
        roles={"trainer": {"pool": "gpus"}, "generator": {"pool": "gpus", "first_slot": 2, "gpus": 0.25, "cpus": 0.5}},
    )
    assert [bundle for _, bundle, _ in places(seating, "generator")] == [2, 3]
    assert places(seating, "generator")[0][2] == {"CPU": 0.5, "GPU": 0.25}
    assert places(seating, "trainer")[0][2] == {"CPU": 0.5, "GPU": 0.5}


def test_a_cpu_role_in_a_gpu_pool_takes_no_gpu() -> None:
    seating = seat(
        TRAINER,
        REWARD,
        pools={"gpus": {"slots": 4, "gpus": 1, "cpus": 2}},
        roles={"trainer": {"pool": "gpus"}, "reward": {"pool": "gpus"}},
    )
    assert places(seating, "reward")[0][2] == {"CPU": 1.0}
    assert places(seating, "trainer")[0][2] == {"CPU": 1.0, "GPU": 1.0}


def test_three_equal_shares_do_not_exceed_the_whole() -> None:
    names = [SeatedRole(name, "trainer", "cuda", 1, 1) for name in ("a", "b", "c")]
    seating = seat(*names, pools={"one": {"slots": 1, "gpus": 1}}, roles={role.name: {"pool": "one"} for role in names})
    assert sum(s.amounts["GPU"] for s in seating.seats) <= 1.0


def test_an_overfull_slot_is_refused_with_the_sum() -> None:
    with pytest.raises(ConfigError, match=r"slot 0 of pool 'p' has 1 GPU.*trainer 1 \+ generator 0.5 = 1.5"):
        seat(
            SeatedRole("trainer", "trainer", "cuda", 1, 1),
            SeatedRole("generator", "generator", "cuda", 1, 1),
            pools={"p": {"slots": 1, "gpus": 1}},
            roles={"trainer": {"pool": "p", "gpus": 1}, "generator": {"pool": "p", "gpus": 0.5}},
        )


def test_a_pool_with_too_few_slots_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'trainer' has 4 worker\(s\) from slot 1 on, which needs 5 slots.*has 4"):
        seat(TRAINER, pools={"p": {"slots": 4, "gpus": 1}}, roles={"trainer": {"pool": "p", "first_slot": 1}})


def test_a_pool_that_nobody_uses_is_not_reserved() -> None:
    assert dict(seat(REWARD, pools={"gpus": {"slots": 4, "gpus": 1}}).total) == {"CPU": 1.0}


def test_consecutive_ranks_that_belong_together_share_a_bundle() -> None:
    trainer = SeatedRole("trainer", "trainer", "cuda", 1, 4, together=2, together_why="ulysses 2")
    seating = seat(trainer)
    assert [dict(bundle) for bundle in seating.groups[0].bundles] == [{"CPU": 2.0, "GPU": 2.0}] * 2
    assert places(seating, "trainer") == [("role 'trainer'", i // 2, {"CPU": 1.0, "GPU": 1.0}) for i in range(4)]
    assert seating.why("trainer") == ["every 2 ranks of 'trainer' on one node (ulysses 2)"]


@pytest.mark.parametrize(("together", "bundles"), [(4, 1), (1, 4)])
def test_a_setting_says_otherwise(together: int, bundles: int) -> None:
    trainer = SeatedRole("trainer", "trainer", "cuda", 1, 4, together=2, together_why="ulysses 2")
    seating = seat(trainer, roles={"trainer": {"together": together}})
    assert len(seating.groups[0].bundles) == bundles
    assert seating.why("trainer") == (
        ["every 4 ranks of 'trainer' on one node (runtime.options.roles.trainer.together)"] if together > 1 else []
    )


def test_an_engine_gets_the_devices_of_its_arguments() -> None:
    engine = SeatedRole("generator", "generator", "cuda", 1, 1, devices=4)
    assert places(seat(engine), "generator")[0][2] == {"CPU": 1.0, "GPU": 4.0}


NEAR = SeatedRole("generator", "generator", "cuda", 2, 1, near="trainer", near_why="'broadcast' moves weights")


@pytest.mark.parametrize("order", [(TRAINER, NEAR), (NEAR, TRAINER)])
def test_a_generator_joins_the_group_of_its_trainer(order: tuple[SeatedRole, SeatedRole]) -> None:
    seating = seat(*order, REWARD)
    name = "role 'trainer' and 'generator'"
    assert [group.name for group in seating.groups if "trainer" in group.name] == [name]
    assert [bundle for _, bundle, _ in places(seating, "trainer")] == [0, 1, 2, 3]
    assert [(group, bundle) for group, bundle, _ in places(seating, "generator")] == [(name, 4), (name, 5)]
    assert places(seating, "reward")[0][:2] == ("role 'reward', replica 0", 0)
    assert seating.why("generator") == ["'generator' near 'trainer' ('broadcast' moves weights)"]
    assert dict(seating.total) == {"CPU": 7.0, "GPU": 6.0}


@pytest.mark.parametrize(
    "wanted", [{"near": "nobody"}, {"one_node": True}, {"pool": "p"}], ids=["nobody", "one_node", "pool"]
)
def test_a_generator_stays_where_the_configuration_puts_it(wanted: dict[str, object]) -> None:
    seating = seat(TRAINER, NEAR, roles={"generator": wanted}, pools={"p": {"slots": 2, "gpus": 1}})
    assert all("trainer" not in group for group, _, _ in places(seating, "generator"))


def test_a_role_may_be_put_next_to_any_other() -> None:
    seating = seat(TRAINER, REWARD, roles={"reward": {"near": "trainer"}})
    assert places(seating, "reward")[0][:2] == ("role 'trainer' and 'reward'", 4)
    assert seating.why("reward") == ["'reward' near 'trainer' (runtime.options.roles.reward.near)"]


def devices(seating: Seating, role: str) -> set[tuple[str, bool]]:
    return {(device.place, device.is_gpu) for seat in seating.of(role) for device in seat.devices}


def test_fractions_of_a_slots_gpu_are_shared_and_whole_gpus_are_not() -> None:
    generator = SeatedRole("generator", "generator", "cuda", 2, 1)
    seating = seat(
        TRAINER,
        generator,
        pools={"gpus": {"slots": 4, "gpus": 1}},
        roles={"trainer": {"pool": "gpus"}, "generator": {"pool": "gpus", "first_slot": 2}},
    )
    shared = {("pool 'gpus', slot 2", True), ("pool 'gpus', slot 3", True)}
    assert devices(seating, "generator") == shared
    assert devices(seating, "trainer") & devices(seating, "generator") == shared
    alone = seat(TRAINER, generator)
    assert not devices(alone, "trainer") & devices(alone, "generator")
    assert len(devices(alone, "trainer")) == 4


def test_on_the_host_roles_of_one_slot_share_its_memory_but_not_with_those_on_its_gpu() -> None:
    reference = SeatedRole("reference", "trainer", "cpu", 1, 1)
    critic = SeatedRole("critic", "trainer", "cpu", 1, 1)
    actor = SeatedRole("trainer", "trainer", "cuda", 1, 1)
    roles = {name: {"pool": "mixed"} for name in ("reference", "critic", "trainer")}
    seating = seat(reference, critic, actor, pools={"mixed": {"slots": 1, "gpus": 1}}, roles=roles)
    assert devices(seating, "reference") == devices(seating, "critic") == {("pool 'mixed', slot 0", False)}
    assert not devices(seating, "trainer") & devices(seating, "critic")


# ------------------------------------------------------------------------------------------ slots with several GPUs

ENGINE = SeatedRole("generator", "generator", "cuda", 2, 1, devices=2)
NODES = {"nodes": {"slots": 1, "gpus": 4, "cpus": 8}}


def gpus(seating: Seating, role: str) -> list[tuple[int, tuple[int, ...]]]:
    """(slot, its GPUs) of every worker."""
    return [(seat.bundle, seat.gpus) for seat in seating.of(role)]


def in_nodes(**roles: dict[str, object]) -> dict[str, object]:
    return {name: {"pool": "nodes", **seat} for name, seat in roles.items()}


def test_an_engine_of_two_gpus_shares_them_with_the_ranks_on_each() -> None:
    seating = seat(TRAINER, ENGINE, pools=NODES, roles=in_nodes(trainer={}, generator={}))
    assert gpus(seating, "trainer") == [(0, (0,)), (0, (1,)), (0, (2,)), (0, (3,))]
    assert gpus(seating, "generator") == [(0, (0, 1)), (0, (2, 3))]
    assert devices(seating, "trainer") == {(f"pool 'nodes', slot 0, GPU {gpu}", True) for gpu in range(4)}
    assert devices(seating, "generator") == devices(seating, "trainer")
    assert places(seating, "trainer")[0] == ("pool 'nodes'", 0, {"CPU": 1.0}), "Ray is asked for no GPU"
    assert places(seating, "generator")[0] == ("pool 'nodes'", 0, {"CPU": 2.0})
    assert dict(seating.total) == {"CPU": 8.0, "GPU": 4.0}, "the slot reserves them"
    assert seating.of("trainer")[2].text == "pool 'nodes', slot 0: 1 CPU, its GPU 2"
    assert seating.of("generator")[1].text == "pool 'nodes', slot 0: 2 CPU, its GPUs 2 and 3"


def test_several_slots_are_filled_one_after_the_other() -> None:
    pools = {"nodes": {"slots": 2, "gpus": 2}}
    seating = seat(TRAINER, ENGINE, pools=pools, roles=in_nodes(trainer={}, generator={}))
    assert gpus(seating, "trainer") == [(0, (0,)), (0, (1,)), (1, (0,)), (1, (1,))]
    assert gpus(seating, "generator") == [(0, (0, 1)), (1, (0, 1))]


def test_an_engine_may_share_a_part_of_the_trainers_gpus() -> None:
    pools = {"nodes": {"slots": 2, "gpus": 2}}
    one = SeatedRole("generator", "generator", "cuda", 1, 1, devices=2)
    seating = seat(TRAINER, one, pools=pools, roles=in_nodes(trainer={}, generator={"first_slot": 1}))
    assert devices(seating, "generator") == {(f"pool 'nodes', slot 1, GPU {gpu}", True) for gpu in range(2)}
    assert devices(seating, "generator") < devices(seating, "trainer")


def test_roles_that_fit_beside_one_another_in_a_slot_do_not_share() -> None:
    trainer = SeatedRole("trainer", "trainer", "cuda", 1, 2)
    one = SeatedRole("generator", "generator", "cuda", 1, 1, devices=2)
    seating = seat(trainer, one, pools=NODES, roles=in_nodes(trainer={}, generator={}))
    assert gpus(seating, "trainer") == [(0, (0,)), (0, (1,))]
    assert gpus(seating, "generator") == [(0, (2, 3))]


def test_workers_a_slot_may_be_fewer_than_it_has_gpus_for() -> None:
    pools = {"nodes": {"slots": 4, "gpus": 2, "cpus": 8}}
    seating = seat(TRAINER, pools=pools, roles=in_nodes(trainer={"per_slot": 1}))
    assert gpus(seating, "trainer") == [(slot, (0,)) for slot in range(4)]


def test_a_worker_on_the_host_drives_no_gpu_of_its_slot() -> None:
    seating = seat(TRAINER, REWARD, pools=NODES, roles=in_nodes(trainer={}, reward={}))
    assert gpus(seating, "reward") == [(0, ())]
    assert seating.of("reward")[0].text == "pool 'nodes', slot 0: 4 CPU"


def test_a_reward_has_its_gpu_alone_because_it_takes_no_turns() -> None:
    trainer = SeatedRole("trainer", "trainer", "cuda", 1, 2)
    one = SeatedRole("generator", "generator", "cuda", 1, 1, devices=2)
    asked = in_nodes(trainer={}, generator={}, reward={"gpus": 1})
    seating = seat(trainer, one, REWARD, pools=NODES, roles=asked)
    assert gpus(seating, "reward") == [(0, (3,))]
    assert gpus(seating, "trainer") == [(0, (0,)), (0, (1,))]
    assert gpus(seating, "generator") == [(0, (0, 1))]
    with pytest.raises(
        ConfigError, match=r"drive 1 GPU\(s\) each = 4, but the slot has 4, of which reward has 1 alone"
    ):
        seat(TRAINER, REWARD, pools=NODES, roles=in_nodes(trainer={}, reward={"gpus": 1}))


def test_a_slot_with_fewer_gpus_than_an_engine_drives_is_refused() -> None:
    four = SeatedRole("generator", "generator", "cuda", 2, 1, devices=4)
    for slot, engine in ((1, ENGINE), (2, four)):
        told = rf"drives {engine.devices} GPU\(s\), but a slot of pool 'p' has {slot} \(.* Raise it to {engine.devices}"
        with pytest.raises(ConfigError, match=told):
            seat(engine, pools={"p": {"slots": 2, "gpus": slot}}, roles={"generator": {"pool": "p"}})


def test_more_ranks_than_gpus_are_refused() -> None:
    eight = SeatedRole("trainer", "trainer", "cuda", 1, 8)
    with pytest.raises(ConfigError, match=r"has 8 worker\(s\) from slot 0 on, which needs 2 slots \(4 a slot\)"):
        seat(eight, pools=NODES, roles=in_nodes(trainer={}))
    with pytest.raises(
        ConfigError, match=r"8 worker\(s\) in slot 0 .* drive 1 GPU\(s\) each = 8, but .* has 4\. Raise"
    ):
        seat(eight, pools=NODES, roles=in_nodes(trainer={"per_slot": 8}))


@pytest.mark.parametrize("asked", [0.5, 1], ids=["a fraction", "fewer than it drives"])
def test_a_share_that_is_no_use_is_refused(asked: float) -> None:
    with pytest.raises(ConfigError, match=r"roles\.generator\.gpus is [\d.]+, but .* drives whole ones, 2 of them"):
        seat(ENGINE, pools=NODES, roles=in_nodes(generator={"gpus": asked}))


def test_a_slot_has_whole_gpus_if_it_has_several() -> None:
    with pytest.raises(ConfigError, match=r"pools\.nodes\.gpus is 2\.5: a slot with several GPUs has whole ones"):
        seat(TRAINER, pools={"nodes": {"slots": 4, "gpus": 2.5}}, roles=in_nodes(trainer={}))


def test_a_role_on_gpus_in_a_pool_without_them_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'trainer' is to run on a GPU, but the slots of pool 'p' have none"):
        seat(TRAINER, pools={"p": {"slots": 4}}, roles={"trainer": {"pool": "p"}})
