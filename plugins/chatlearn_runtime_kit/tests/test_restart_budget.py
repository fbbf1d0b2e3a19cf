"""Restarts are counted over a whole run, told, and refused with the last cause when the limit is reached."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from chatlearn_core.exceptions import (
    BackendError,
    ConfigError,
    ReplicaLostError,
    RuntimeLostError,
    TrainerLostError,
    WorkerPlace,
)
from chatlearn_core.protocols import RuntimeEvent
from chatlearn_runtime_kit.restart_budget import RestartBudget

PLACE = WorkerPlace("generator", "replica 0", "generate")


class DeathError(BackendError):
    process_is_gone = True


def restarts(
    limit: int,
    told: list[RuntimeEvent] | None = None,
    error: type[BackendError] = ReplicaLostError,
    together: bool = False,
) -> RestartBudget:
    tell = None if told is None else told.append
    return RestartBudget(
        "generator", limit, setting="options.max", event="replica_rebuilt", error=error, tell=tell, together=together
    )


def builds(*outcomes: BaseException | None) -> tuple[Callable[[], Awaitable[None]], list[int]]:
    """A builder that raises these, one after the other; and the attempts so far."""
    attempts: list[int] = []

    async def build() -> None:
        attempts.append(len(attempts))
        outcome = outcomes[len(attempts) - 1]
        if outcome is not None:
            raise outcome

    return build, attempts


async def test_a_worker_that_dies_of_being_built_is_built_again() -> None:
    told: list[RuntimeEvent] = []
    build, attempts = builds(BackendError("no memory"), None)
    owner = restarts(3, told)
    await owner.rebuild("replica 0", BackendError("killed"), build)
    assert (len(attempts), owner.count) == (2, 2)
    assert [event.facts["restart"] for event in told] == [1, 2]
    assert told[0].text == (
        "role 'generator': replica 0 died and is rebuilt (restart 1 of at most 3, options.max). killed"
    )
    assert told[1].text.endswith("no memory")


async def test_the_limit_is_the_runs_and_the_error_knows_the_last_cause_and_its_place() -> None:
    owner = restarts(2, together=True)
    build, _ = builds(None)
    await owner.rebuild("replica 0", BackendError("killed"), build)
    build, attempts = builds(BackendError("no memory").at(PLACE, "a stack"), None)
    with pytest.raises(ReplicaLostError) as error:
        await owner.rebuild("replica 1", BackendError("killed"), build)
    assert str(error.value).endswith(
        "replica 1 died, and 2 restart(s), the limit (options.max), are used up. Last cause: no memory"
    )
    assert (error.value.place, error.value.stack) == (PLACE, "a stack")
    assert len(attempts) == 1


async def test_the_loss_of_a_machine_costs_each_worker_one_restart() -> None:
    owner = restarts(1)
    for number in range(4):
        await owner.rebuild(f"replica {number}", BackendError("its node is gone"), builds(None)[0])
    assert owner.count == 4
    with pytest.raises(ReplicaLostError, match=r"replica 2 died, and 1 restart\(s\), the limit"):
        owner.spend("replica 2", BackendError("killed"))
    owner.give_back("replica 2")
    assert not owner.is_spent("replica 2")
    owner.spend("replica 2", BackendError("killed"))


async def test_what_no_rebuilding_helps_is_raised_at_once() -> None:
    for error in (ConfigError("no such device"), TrainerLostError("rank 0 died as it sent weights")):
        owner = restarts(5)
        build, attempts = builds(error, None)
        with pytest.raises(type(error)):
            await owner.rebuild("replica 0", BackendError("killed"), build)
        assert len(attempts) == 1


async def test_a_trainers_own_loss_is_a_reason_to_rebuild_it_again() -> None:
    owner = restarts(5, error=TrainerLostError)
    build, attempts = builds(TrainerLostError("rank 1 died"), None)
    await owner.rebuild("a rank", BackendError("killed"), build)
    assert len(attempts) == 2


async def test_a_first_start_counts_nothing_unless_a_process_dies() -> None:
    owner = restarts(1)
    build, _ = builds(None)
    await owner.start("replica 0", build)
    assert owner.count == 0
    build, attempts = builds(DeathError("killed"), None)
    await owner.start("replica 0", build)
    assert (len(attempts), owner.count) == (2, 1)
    build, attempts = builds(BackendError("the model does not fit"), None)
    with pytest.raises(BackendError, match="does not fit"):
        await owner.start("replica 0", build)
    assert len(attempts) == 1, "a process that answers would answer the same again"


@pytest.mark.parametrize("error", [ReplicaLostError, TrainerLostError])
async def test_nothing_is_rebuilt_on_a_runtime_that_is_lost(error: type[BackendError]) -> None:
    lost = RuntimeLostError("the cluster is gone")
    build, attempts = builds(lost)
    owner = restarts(5, error=error)
    with pytest.raises(RuntimeLostError, match="the cluster is gone"):
        await owner.rebuild("replica 0", lost, build)
    assert (len(attempts), owner.count) == (0, 0)
    with pytest.raises(RuntimeLostError, match="the cluster is gone"):
        await owner.rebuild("replica 0", BackendError("killed"), build)
    assert len(attempts) == 1
