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
