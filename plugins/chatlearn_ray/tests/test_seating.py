from __future__ import annotations

import pytest

from chatlearn_core.exceptions import ConfigError
from chatlearn_ray.options import RayRuntimeOptions
from chatlearn_ray.seating import SeatedRole, Seating, seat_roles, shortage

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


def test_an_unknown_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"roles\.trainer\.pool is 'gpu', but runtime\.options\.pools has 'gpus'"):
        seat(TRAINER, pools={"gpus": {"slots": 4}}, roles={"trainer": {"pool": "gpu"}})


def test_a_pool_that_nobody_uses_is_not_reserved() -> None:
    assert dict(seat(REWARD, pools={"gpus": {"slots": 4, "gpus": 1}}).total) == {"CPU": 1.0}


def test_what_fits_has_no_shortage() -> None:
    assert shortage(seat(TRAINER, REWARD), {"a": {"CPU": 8, "GPU": 2}, "b": {"CPU": 8, "GPU": 2}}) is None


def test_a_shortage_shows_the_arithmetic() -> None:
    text = shortage(seat(TRAINER, GENERATOR), {"a": {"CPU": 16, "GPU": 2}, "b": {"CPU": 16, "GPU": 1}})
    assert text is not None
    assert "GPU: 4 (role 'trainer') + 2 (role 'generator', replica 0) + 2 (role 'generator', replica 1) = 8" in text
    assert "2 node(s) have 3: 5 missing" in text


def test_ranks_that_belong_on_one_node_need_one_large_enough() -> None:
    seating = seat(TRAINER, roles={"trainer": {"one_node": True}})
    text = shortage(seating, {"a": {"CPU": 16, "GPU": 2}, "b": {"CPU": 16, "GPU": 2}})
    assert text is not None
    assert "role 'trainer' needs together 4 CPU, 4 GPU on one node: a has 16 CPU, 2 GPU; b has 16 CPU, 2 GPU" in text


def test_consecutive_ranks_that_belong_together_share_a_bundle() -> None:
    trainer = SeatedRole("trainer", "trainer", "cuda", 1, 4, together=2, together_why="ulysses 2")
    seating = seat(trainer)
    assert [dict(bundle) for bundle in seating.groups[0].bundles] == [{"CPU": 2.0, "GPU": 2.0}] * 2
    assert places(seating, "trainer") == [("role 'trainer'", i // 2, {"CPU": 1.0, "GPU": 1.0}) for i in range(4)]
    assert seating.why("trainer") == ["every 2 ranks of 'trainer' on one node (ulysses 2)"]
    text = shortage(seating, {name: {"CPU": 8, "GPU": 1} for name in "abcd"})
    assert text is not None
    assert "needs 2 CPU, 2 GPU on one node (every 2 ranks of 'trainer' on one node (ulysses 2)): a has 8 CPU, 1" in text


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


def test_several_ranks_may_share_a_large_slot() -> None:
    seating = seat(
        TRAINER,
        pools={"nodes": {"slots": 2, "gpus": 2, "cpus": 8}},
        roles={"trainer": {"pool": "nodes", "per_slot": 2}},
    )
    assert places(seating, "trainer") == [("pool 'nodes'", i // 2, {"CPU": 4.0, "GPU": 1.0}) for i in range(4)]


def test_parts_of_several_gpus_are_refused() -> None:
    engine = SeatedRole("generator", "generator", "cuda", 2, 1, devices=2)
    with pytest.raises(
        ConfigError, match=r"'generator' drives 2 GPU\(s\), and its share of a slot of pool 'p' is 1 of 2"
    ):
        seat(
            SeatedRole("trainer", "trainer", "cuda", 1, 2),
            engine,
            pools={"p": {"slots": 2, "gpus": 2}},
            roles={"trainer": {"pool": "p"}, "generator": {"pool": "p"}},
        )
    with pytest.raises(ConfigError, match="Roles that share GPUs need slots of one GPU"):
        seat(engine, pools={"p": {"slots": 2, "gpus": 1}}, roles={"generator": {"pool": "p"}})


def test_a_shortage_of_one_kind_of_bundle_is_seen() -> None:
    engine = SeatedRole("generator", "generator", "cuda", 1, 1, devices=4, near="trainer", near_why="it is faster")
    text = shortage(seat(TRAINER, engine), {name: {"CPU": 8, "GPU": 3} for name in "abc"})
    assert text is not None
    assert "role 'trainer' and 'generator' needs 1 CPU, 4 GPU on one node" in text


def devices(seating: Seating, role: str) -> set[tuple[str, bool]]:
    return {(seat.device.place, seat.device.is_gpu) for seat in seating.of(role)}


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
