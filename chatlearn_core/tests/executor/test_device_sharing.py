"""Who takes turns, and what moves before each use: expected values follow from the rule, written out by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.executor.device_sharing import (
    DeviceUse,
    OffloadMode,
    Sharing,
    find_sharing,
    schedule,
    sync_uses,
)
from chatlearn_core.flow import trace
from chatlearn_core.protocols import Device

GPU0, GPU1, GPU2 = (Device(f"node, GPU {i}", is_gpu=True) for i in range(3))
HOST = Device("cpu", is_gpu=False)
KINDS = {"generator": "generator", "reward": "reward", "trainer": "trainer", "reference": "trainer"}
ROLES: Any = {
    name: SimpleNamespace(name=name, kind=kind, trainable=name == "trainer", holds_a_model=kind != "reward", uses={})
    for name, kind in KINDS.items()
}
PLAN: Any = SimpleNamespace(
    weight_syncs=(SimpleNamespace(trainer="trainer", target="generator"),), refreshes={}, roles=ROLES
)


def grpo(prompts: Any, m: Any) -> Any:
    samples = m.generator.generate(prompts)
    return m.join(samples, m.reward.score(samples), m.reference.logprobs(samples), m.trainer.logprobs(samples))


GRAPH = trace(grpo, KINDS)


def sharing(mode: OffloadMode = "auto", **devices: set[Device]) -> Sharing:
    return find_sharing(ROLES, {role: frozenset(own) for role, own in devices.items()}, mode)


def moves(found: Sharing) -> dict[str, list[str]]:
    return {step.name: [str(move) for move in step.moves] for step in schedule(found, PLAN, GRAPH, ["trainer"])}


def test_colocated_roles_take_turns_in_the_order_of_the_flow() -> None:
    found = sharing(trainer={GPU0}, generator={GPU0}, reference={GPU0})
    assert moves(found) == {
        "generator.generate": ["offload trainer (weights)", "onload generator (kv_cache)"],
        "reference.logprobs": ["offload generator (weights, kv_cache)", "onload reference (weights)"],
        "trainer.logprobs": ["offload reference (weights)", "onload trainer (weights)"],
        "trainer.update": ["onload trainer (gradients, optimizer)"],
        "sync trainer -> generator": ["offload trainer (gradients, optimizer)", "onload generator (weights)"],
    }


def test_at_a_sync_the_trainers_weights_come_first_and_the_kv_cache_last() -> None:
    """As after a start or a checkpoint, when everything is away."""
    found = sharing(trainer={GPU0}, generator={GPU0})
    away: dict[str, Any] = {role: dict.fromkeys(parts, False) for role, parts in found.parts.items()}
    before = found.moves(sync_uses("trainer", "generator"), away)
    assert [str(move) for move in before] == ["onload trainer (weights)", "onload generator (weights)"]
    away["trainer"]["weights"] = away["generator"]["weights"] = True
    after = found.moves([DeviceUse("generator", "generate")], away)
    assert [str(move) for move in after] == ["offload trainer (weights)", "onload generator (kv_cache)"]


def test_exclusive_roles_are_never_moved() -> None:
    found = sharing(trainer={GPU0}, generator={GPU1}, reference={GPU2})
    assert found == Sharing()
    assert all(step == [] for step in moves(found).values())


def test_partly_shared_roles_move_whole_and_an_exclusive_one_stays() -> None:
    """Two replicas of the generator, one of them beside the trainer; the reference sits alone."""
    found = sharing(trainer={GPU0}, generator={GPU0, GPU1}, reference={GPU2})
    assert set(found.devices) == {"trainer", "generator"}
    assert found.devices["generator"] == {GPU0}, "only what is contested"
    assert moves(found) == {
        "generator.generate": ["offload trainer (weights)", "onload generator (kv_cache)"],
        "reference.logprobs": [],
        "trainer.logprobs": ["offload generator (weights, kv_cache)", "onload trainer (weights)"],
        "trainer.update": ["onload trainer (gradients, optimizer)"],
        "sync trainer -> generator": ["offload trainer (gradients, optimizer)", "onload generator (weights)"],
    }


def test_roles_that_meet_on_different_devices_do_not_disturb_each_other() -> None:
    """Trainer and generator share one GPU, trainer and reference another: the reference does not wake the generator."""
    found = sharing(trainer={GPU0, GPU1}, generator={GPU0}, reference={GPU1})
    assert moves(found)["reference.logprobs"] == ["onload reference (weights)"]
    assert moves(found)["trainer.logprobs"] == [
        "offload generator (weights, kv_cache)",
        "offload reference (weights)",
        "onload trainer (weights)",
    ]


def test_a_checkpoint_needs_the_optimizer_but_no_gradients() -> None:
    found = sharing(trainer={GPU0}, generator={GPU0})
    held: Any = {
        "trainer": {"weights": True, "gradients": False, "optimizer": False},
        "generator": {"weights": True, "kv_cache": False},
    }
    assert [str(move) for move in found.moves([DeviceUse("trainer", "save")], held)] == [
        "offload generator (weights)",
        "onload trainer (optimizer)",
    ]


def test_parts_of_unknown_place_are_made_sure_of_either_way() -> None:
    found = sharing(trainer={GPU0}, generator={GPU0})
    held: Any = {
        "trainer": dict.fromkeys(("weights", "gradients", "optimizer"), None),
        "generator": {"weights": False, "kv_cache": False},
    }
    assert [str(move) for move in found.moves([DeviceUse("trainer", "load")], held)] == [
        "offload trainer (gradients)",
        "onload trainer (weights, optimizer)",
    ]


@pytest.mark.parametrize(("mode", "takes_turns"), [("auto", False), ("always", True), ("never", False)])
def test_a_shared_cpu_is_minded_only_on_request(mode: OffloadMode, takes_turns: bool) -> None:
    assert bool(sharing(mode, trainer={HOST}, generator={HOST}).devices) is takes_turns


@pytest.mark.parametrize(("mode", "takes_turns"), [("auto", True), ("always", True), ("never", False)])
def test_a_shared_gpu_is_minded_unless_forbidden(mode: OffloadMode, takes_turns: bool) -> None:
    assert bool(sharing(mode, trainer={GPU0}, generator={GPU0}).devices) is takes_turns


def test_a_kept_kv_cache_is_refused_where_it_is_released() -> None:
    found = sharing(trainer={GPU0}, generator={GPU0})
    with pytest.raises(ConfigError, match=r"KV cache of roles\.generator, .* released for roles\.trainer on the same"):
        found.check_kept("rollout.partial: keep", ["generator"])
    sharing(trainer={GPU0}, generator={GPU1}).check_kept("rollout.partial: keep", ["generator"])


def test_a_reward_takes_its_turn_with_the_roles_that_it_calls() -> None:
    """The judge comes when sampling is over, and leaves before the trainer."""
    kinds = {**KINDS, "judge": "generator"}
    roles = {
        name: SimpleNamespace(name=name, kind=kind, trainable=name == "trainer", holds_a_model=kind != "reward")
        for name, kind in kinds.items()
    }
    plan: Any = SimpleNamespace(weight_syncs=PLAN.weight_syncs, refreshes={}, roles=roles)
    own = {role: frozenset({GPU0}) for role in ("trainer", "generator", "judge")}
    found = find_sharing(roles, own, "auto")  # type: ignore[arg-type]  # stands for the plan's roles
    steps = schedule(found, plan, trace(grpo, kinds, uses={"reward": ["judge"]}), ["trainer"])
    assert {step.name: [str(move) for move in step.moves] for step in steps} == {
        "generator.generate": ["offload trainer (weights)", "onload generator (kv_cache)"],
        "reward.score": ["offload generator (weights, kv_cache)", "onload judge (weights, kv_cache)"],
        "reference.logprobs": [],
        "trainer.logprobs": ["offload judge (weights, kv_cache)", "onload trainer (weights)"],
        "trainer.update": ["onload trainer (gradients, optimizer)"],
        "sync trainer -> generator": ["offload trainer (gradients, optimizer)", "onload generator (weights)"],
    }
