from __future__ import annotations

from chatlearn_ray.capacity import shortage
from chatlearn_ray.options import RayRuntimeOptions
from chatlearn_ray.placement import PlacedRole, PlacementPlan, place_roles

TRAINER = PlacedRole("trainer", "trainer", "cuda", 1, 4)
GENERATOR = PlacedRole("generator", "generator", "cuda", 2, 2)
REWARD = PlacedRole("reward", "reward", "auto", 1, 1)


def place(*roles: PlacedRole, **options: object) -> PlacementPlan:
    return place_roles(roles, RayRuntimeOptions.model_validate(options))


def test_a_fitting_plan_has_no_shortage() -> None:
    assert shortage(place(TRAINER, REWARD), {"a": {"CPU": 8, "GPU": 2}, "b": {"CPU": 8, "GPU": 2}}) is None


def test_a_shortage_shows_the_arithmetic() -> None:
    text = shortage(place(TRAINER, GENERATOR), {"a": {"CPU": 16, "GPU": 2}, "b": {"CPU": 16, "GPU": 1}})
    assert text is not None
    assert "GPU: 4 (role 'trainer') + 2 (role 'generator', replica 0) + 2 (role 'generator', replica 1) = 8" in text
    assert "2 node(s) have 3: 5 missing" in text


def test_ranks_that_belong_on_one_node_need_one_large_enough() -> None:
    placement_plan = place(TRAINER, roles={"trainer": {"one_node": True}})
    text = shortage(placement_plan, {"a": {"CPU": 16, "GPU": 2}, "b": {"CPU": 16, "GPU": 2}})
    assert text is not None
    assert "role 'trainer' needs together 4 CPU, 4 GPU on one node: a has 16 CPU, 2 GPU; b has 16 CPU, 2 GPU" in text


def test_a_shortage_of_one_kind_of_bundle_is_seen() -> None:
    engine = PlacedRole("generator", "generator", "cuda", 1, 1, devices=4, near="trainer", near_why="it is faster")
    text = shortage(place(TRAINER, engine), {name: {"CPU": 8, "GPU": 3} for name in "abc"})
    assert text is not None
    assert "role 'trainer' and 'generator' needs 1 CPU, 4 GPU on one node" in text


def test_a_bundle_of_ranks_that_belong_together_needs_a_node_with_as_many_gpus() -> None:
    trainer = PlacedRole("trainer", "trainer", "cuda", 1, 4, together=2, together_why="ulysses 2")
    text = shortage(place(trainer), {name: {"CPU": 8, "GPU": 1} for name in "abcd"})
    assert text is not None
    assert "needs 2 CPU, 2 GPU on one node (every 2 ranks of 'trainer' on one node (ulysses 2)): a has 8 CPU, 1" in text


def test_a_slot_that_is_shared_needs_its_gpus_once() -> None:
    engine = PlacedRole("generator", "generator", "cuda", 2, 1, devices=2)
    shared = {"pool": "node"}
    placement_plan = place(
        TRAINER, engine, pools={"node": {"slots": 1, "gpus": 4}}, roles={"trainer": shared, "generator": shared}
    )
    assert shortage(placement_plan, {"a": {"CPU": 8, "GPU": 4}}) is None
    three = {"CPU": 8, "GPU": 3}
    assert "pool 'node' needs 1 CPU, 4 GPU on one node" in str(shortage(placement_plan, {"a": three, "b": three}))
