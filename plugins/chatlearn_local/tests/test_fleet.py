"""Replicas: a group stays together, a dead one is rebuilt once, gets the current weights, and loses nothing; one that
takes no requests is gone past.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from chatlearn_core.exceptions import (
    BackendError,
    BackendTimeoutError,
    HostedProcessLostError,
    ReplicaLostError,
    TrainerLostError,
)
from chatlearn_core.protocols import OnTokens
from chatlearn_core.runtime.serial_executor import SerialExecutor
from chatlearn_core.types import RAW_BASIS, Completion, GenerateRequest, SamplingParams, SyncReceipt
from chatlearn_local.fleet import LocalFleet


def completion_of(request: GenerateRequest) -> Completion:
    logprobs = np.zeros(1, np.float32)
    return Completion(request.id, np.array([request.sampling.seed]), logprobs, RAW_BASIS, "stop", request.sampling, ())


class FakeGenerator:
    """Answers at once, unless the test makes it hold requests or die."""

    def __init__(self, index: int, generation: int, behaviour: str) -> None:
        self.index, self.generation, self.behaviour = index, generation, behaviour
        self.state = "loading"
        self.policy_version = 0
        self.calls: list[str] = []
        self.requests: list[GenerateRequest] = []
        self.waiting: list[asyncio.Future[Completion]] = []

    def setup(self) -> None:
        self.calls.append("setup")
        if self.behaviour == "killed in setup":
            error = HostedProcessLostError("its process 7 was killed by signal 9 (SIGKILL)")
            error.process_is_gone = True
            raise error
        self.state = "serving"

    def health(self) -> str | None:
        if self.behaviour == "never pause":
            return "its scheduler has stopped"
        if self.behaviour == "breaks":
            raise OSError("no such process")
        return None if self.state == "serving" else f"it is {self.state}"

    def close(self) -> None:
        self.calls.append("close")

    def offload(self, parts: Any) -> None:
        self.calls.append("offload")

    def onload(self, parts: Any) -> None:
        self.calls.append("onload")

    async def abort(self, request_ids: Any = None) -> None:
        self.calls.append(f"abort {request_ids}")

    async def pause(self) -> None:
        self.calls.append("pause")
        if self.behaviour == "never pause":
            await asyncio.Event().wait()
        if self.behaviour.startswith("pause"):
            self.state = "dead" if self.behaviour == "pause kills" else self.state
            raise BackendError("cannot pause")

    async def resume(self) -> None:
        self.calls.append("resume")

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        self.requests.append(request)
        if self.behaviour == "refuse":
            raise BackendError("the prompt does not fit")
        if self.behaviour == "raise":
            raise RuntimeError("engine bug")
        if self.behaviour == "cancel":
            raise asyncio.CancelledError
        if self.behaviour == "time out":
            raise TimeoutError("the engine's own")
        if self.behaviour == "hold":
            future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
            self.waiting.append(future)
            return await future
        return completion_of(request)

    @property
    def loader(self) -> FakeGenerator:
        return self

    async def fail(self, reason: str) -> None:
        self.state = "dead"

    def die(self, error: Exception) -> None:
        self.state = "dead"
        for future in self.waiting:
            future.set_exception(error)


class Builder:
    """Builds replicas; the n-th one of an index behaves as the n-th entry says, the last entry from then on."""

    def __init__(self, *behaviours: str) -> None:
        self.behaviours = behaviours or ("answer",)
        self.built: list[FakeGenerator] = []

    def __call__(self, index: int) -> Any:
        generation = sum(generator.index == index for generator in self.built)
        generator = FakeGenerator(index, generation, self.behaviours[min(generation, len(self.behaviours) - 1)])
        self.built.append(generator)
        return generator


@pytest.fixture
def executor() -> Iterator[SerialExecutor]:
    executor = SerialExecutor("generator", timeout_s=30.0)
    yield executor
    executor.stop()


def make_request(number: int, group: str = "g") -> GenerateRequest:
    return GenerateRequest(f"{group}#{number}", np.array([1]), SamplingParams(4, seed=number), group)


async def started(
    builder: Builder, executor: SerialExecutor, *, replicas: int = 1, max_restarts: int = 2
) -> LocalFleet:
    fleet = LocalFleet("generator", builder, replicas, executor, max_restarts)
    await fleet.start()
    return fleet


async def test_a_replica_whose_engine_is_killed_as_it_starts_is_built_again(executor: SerialExecutor) -> None:
    builder = Builder("killed in setup", "answer")
    fleet = await started(builder, executor, replicas=2)
    assert [(g.index, g.generation, g.calls) for g in builder.built] == [
        (0, 0, ["setup", "close"]),
        (0, 1, ["setup"]),
        (1, 0, ["setup", "close"]),
        (1, 1, ["setup"]),
    ]
    assert fleet.num_restarts == 2
    with pytest.raises(ReplicaLostError, match=r"1 restart\(s\), the limit .* killed by signal 9"):
        await started(Builder("killed in setup"), executor, max_restarts=1)


async def hold(fleet: LocalFleet, builder: Builder, count: int) -> list[asyncio.Task[Completion]]:
    """Send requests and wait until the replica holds them all."""
    tasks = [asyncio.create_task(fleet.generate(make_request(i))) for i in range(count)]
    while len(builder.built[0].waiting) < count:
        await asyncio.sleep(0)
    return tasks


async def test_a_group_goes_to_one_replica_and_groups_are_spread(executor: SerialExecutor) -> None:
    builder = Builder()
    fleet = await started(builder, executor, replicas=3)
    for group in range(20):
        for number in range(4):
            await fleet.generate(make_request(number, f"group{group}"))
    for generator in builder.built:
        groups = [request.group_id for request in generator.requests]
        assert groups, "every replica has work"
        assert all(groups.count(group) == 4 for group in set(groups)), "no group is split"
        assert all(zlib.crc32(group.encode()) % 3 == generator.index for group in groups), "whatever the timing"


async def test_a_dead_replica_is_rebuilt_once_for_all_of_its_requests(executor: SerialExecutor) -> None:
    builder = Builder("hold", "answer")
    fleet = await started(builder, executor)
    tasks = await hold(fleet, builder, 5)
    builder.built[0].die(BackendError("the engine was killed"))
    completions = await asyncio.gather(*tasks)
    assert [completion.token_ids[0] for completion in completions] == [0, 1, 2, 3, 4]
    assert fleet.num_restarts == 1
    assert [generator.calls for generator in builder.built] == [["setup", "close"], ["setup"]]
    again = [request.sampling.seed for request in builder.built[1].requests]
    assert again == [0, 1, 2, 3, 4], "the same random numbers, in the order of submission"


async def test_an_error_that_is_not_chatlearns_also_means_a_restart_if_the_replica_is_dead(
    executor: SerialExecutor,
) -> None:
    builder = Builder("hold", "answer")
    fleet = await started(builder, executor)
    [task] = await hold(fleet, builder, 1)
    builder.built[0].die(RuntimeError("CUDA error"))
    assert (await task).request_id == "g#0"


async def test_a_rebuilt_replica_serves_nobody_before_it_holds_the_current_weights(executor: SerialExecutor) -> None:
    builder = Builder("hold", "answer")
    fleet = await started(builder, executor)
    syncing, synced = asyncio.Event(), asyncio.Event()

    async def resync(index: int) -> None:
        syncing.set()
        await synced.wait()
        builder.built[1].policy_version = 7

    fleet.resync = resync
    [early] = await hold(fleet, builder, 1)
    builder.built[0].die(BackendError("gone"))
    await syncing.wait()
    late = asyncio.create_task(fleet.generate(make_request(1)))
    for _ in range(10):
        await asyncio.sleep(0)
    assert builder.built[1].requests == [], "its weights are still those of the model directory"
    synced.set()
    await asyncio.gather(early, late)
    assert fleet.policy_version == 7


async def test_what_dies_while_the_fleet_is_paused_waits_for_the_sync_and_goes_on_after_it(
    executor: SerialExecutor,
) -> None:
    builder = Builder("hold", "answer")
    fleet = await started(builder, executor)
    versions: list[int] = []

    async def resync(index: int) -> None:
        versions.append(version)

    fleet.resync, version = resync, 1
    [task] = await hold(fleet, builder, 1)
    await fleet.pause()
    builder.built[0].die(BackendError("the engine was killed"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(builder.built) == 1, "the trainer is in the middle of an update: its weights are those of no version"
    version = 2
    await fleet.revive()  # as a weight sync does
    for _ in range(20):
        await asyncio.sleep(0)
    assert builder.built[1].requests == [], "still paused"
    await fleet.resume()
    assert (await task).request_id == "g#0"
    assert versions == [2]
    assert fleet.num_restarts == 1, "one death, one restart"


async def test_a_replica_that_is_named_serves_the_request(executor: SerialExecutor) -> None:
    builder = Builder()
    fleet = await started(builder, executor, replicas=3)
    for replica in (2, 0, 2):
        await fleet.generate(make_request(0), replica)
    assert [len(generator.requests) for generator in builder.built] == [1, 0, 2]
    assert fleet.num_replicas == 3


async def test_a_pause_that_kills_a_replica_is_its_requests_matter(executor: SerialExecutor) -> None:
    builder = Builder("pause kills", "answer")
    fleet = await started(builder, executor, replicas=2)
    builder.built[1].behaviour = "answer"
    await fleet.pause()
    assert builder.built[1].calls == ["setup", "pause"]
    await fleet.resume()
    assert builder.built[1].calls == ["setup", "pause", "resume"]
    assert builder.built[0].calls == ["setup", "pause"], "it is dead"


async def test_a_pause_that_a_living_replica_refuses_is_told(executor: SerialExecutor) -> None:
    fleet = await started(Builder("pause refused"), executor)
    with pytest.raises(BackendError, match="cannot pause"):
        await fleet.pause()


async def test_after_the_limit_the_run_is_told_the_last_cause(executor: SerialExecutor) -> None:
    builder = Builder("hold", "hold")
    fleet = await started(builder, executor, max_restarts=1)
    [task] = await hold(fleet, builder, 1)
    builder.built[0].die(BackendError("first death"))
    while len(builder.built) < 2 or not builder.built[1].waiting:
        await asyncio.sleep(0)
    builder.built[1].die(BackendError("second death"))
    with pytest.raises(ReplicaLostError) as caught:
        await task
    message = str(caught.value)
    assert "role 'generator': replica 0 died, and 1 restart(s), the limit" in message
    assert "(runtime.options.max_generator_restarts)" in message
    assert message.endswith("Last cause: second death")


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("refuse", "the prompt does not fit"),
        ("raise", r"role 'generator', replica 0: generate\(g#0\) failed: RuntimeError: engine bug"),
        ("cancel", r"replica 0: generate\(g#0\) failed: CancelledError: "),
        ("time out", r"generate\(g#0\) failed: TimeoutError: the engine's own"),
    ],
)
async def test_a_request_that_fails_on_a_living_replica_fails_alone(
    executor: SerialExecutor, behaviour: str, message: str
) -> None:
    fleet = await started(Builder(behaviour), executor)
    with pytest.raises(BackendError, match=message):
        await fleet.generate(make_request(0))
    assert fleet.num_restarts == 0


async def test_a_request_that_nobody_wants_any_more_is_cancelled(executor: SerialExecutor) -> None:
    builder = Builder("hold")
    fleet = await started(builder, executor)
    [task] = await hold(fleet, builder, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert builder.built[0].waiting[0].cancelled()


async def test_a_generation_that_never_ends_is_given_up() -> None:
    executor = SerialExecutor("generator", timeout_s=5.0)
    fleet = await started(Builder("hold"), executor)
    fleet.timeout_s = 0.01
    with pytest.raises(BackendTimeoutError, match=r"request 'g#0' .* 0\.01 s \(roles\.generator\.timeout_s\)"):
        await fleet.generate(make_request(0))
    executor.stop()


async def test_the_policy_version_is_the_oldest_that_serves(executor: SerialExecutor) -> None:
    builder = Builder()
    fleet = await started(builder, executor, replicas=3)
    for generator, version in zip(builder.built, (4, 2, 1), strict=True):
        generator.policy_version = version
    builder.built[2].state = "dead"
    assert fleet.policy_version == 2


async def test_calls_for_all_reach_every_replica(executor: SerialExecutor) -> None:
    builder = Builder()
    fleet = await started(builder, executor, replicas=2)
    await fleet.offload({"weights"})
    await fleet.onload({"weights"})
    await fleet.abort(["a"])
    fleet.close()
    assert [g.calls for g in builder.built] == [["setup", "offload", "onload", "abort ('a',)", "close"]] * 2


async def test_a_replica_that_is_rebuilt_holds_what_the_others_hold_before_it_takes_weights(
    executor: SerialExecutor,
) -> None:
    builder = Builder()
    fleet = await started(builder, executor, replicas=2)
    await fleet.offload({"weights", "kv_cache"})
    await fleet.onload({"weights"})

    async def resync(index: int) -> None:
        builder.built[-1].calls.append("resync")

    fleet.resync = resync
    builder.built[0].die(BackendError("killed"))
    await fleet.restart(0, fleet.replicas[0], BackendError("killed"))
    assert builder.built[-1].calls == ["setup", "offload", "resync"]
    await fleet.onload({"kv_cache"})
    await fleet.restart(1, fleet.replicas[1], BackendError("killed"))
    assert builder.built[-1].calls == ["setup", "resync"], "nothing is away any more"


async def test_a_dead_replica_moves_nothing_and_is_left_out_of_what_is_told(executor: SerialExecutor) -> None:
    builder = Builder()
    fleet = await started(builder, executor, replicas=2)
    builder.built[0].die(BackendError("killed"))
    events = await fleet.offload({"weights"})
    assert [(event.worker, event.part, event.live_bytes) for event in events] == [(1, "weights", None)]
    assert "offload" not in builder.built[0].calls


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_requests_go_past_a_replica_that_loads_weights_group_by_group(executor: SerialExecutor) -> None:
    builder = Builder()
    fleet = await started(builder, executor, replicas=3)
    with fleet.loading([1]):
        assert fleet.accepting == {0, 2}
        for number in range(3):
            await fleet.generate(make_request(number), 1)
            await fleet.generate(make_request(number, "h"), 0)
    groups = [[request.group_id for request in generator.requests] for generator in builder.built]
    assert groups[1] == []
    assert groups[0] in (["h"] * 3, ["g", "h"] * 3), "a replica that serves keeps what names it"
    assert len(groups[0]) + len(groups[2]) == 6
    await fleet.generate(make_request(9), 1)
    assert [request.id for request in builder.built[1].requests] == ["g#9"]


async def test_requests_wait_only_where_no_replica_serves(executor: SerialExecutor) -> None:
    builder = Builder()
    fleet = await started(builder, executor, replicas=2)
    with fleet.loading([0, 1]):
        tasks = [asyncio.create_task(fleet.generate(make_request(index), index)) for index in range(2)]
        await settled()
        assert [generator.requests for generator in builder.built] == [[], []]
    await asyncio.gather(*tasks)
    assert [[r.id for r in g.requests] for g in builder.built] == [["g#0"], ["g#1"]], "each where it was wanted"


async def test_a_wait_for_any_replica_ends_and_names_them(executor: SerialExecutor) -> None:
    fleet = await started(Builder(), executor, replicas=2)
    fleet.timeout_s = 0.01
    with fleet.loading([0, 1]), pytest.raises(BackendTimeoutError) as caught:
        await fleet.generate(make_request(0))
    assert str(caught.value).startswith(
        "role 'generator': request 'g#0' found no replica that serves within 0.01 s (roles.generator.timeout_s): "
        "replica 0 loads weights, replica 1 loads weights."
    )
    assert caught.value.place is not None
    assert caught.value.place.role == "generator"


async def test_a_wait_for_a_replica_that_is_rebuilt_is_as_long_as_that_takes(executor: SerialExecutor) -> None:
    builder = Builder("hold", "answer")
    fleet = await started(builder, executor)
    synced = asyncio.Event()

    async def resync(index: int) -> None:
        await synced.wait()

    fleet.resync = resync
    [early] = await hold(fleet, builder, 1)
    builder.built[0].die(BackendError("gone"))
    while fleet.accepting:
        await asyncio.sleep(0)
    fleet.timeout_s = 0.001
    late = asyncio.create_task(fleet.generate(make_request(1)))
    await asyncio.sleep(0.02)
    assert not late.done(), "a rebuild has timeouts of its own"
    fleet.timeout_s = 30.0
    synced.set()
    await asyncio.gather(early, late)


async def test_new_requests_go_past_a_replica_that_is_rebuilt_and_what_it_had_waits_for_it(
    executor: SerialExecutor,
) -> None:
    builder = Builder("hold", "answer")
    fleet = await started(builder, executor, replicas=2)
    builder.built[1].behaviour = "answer"
    synced = asyncio.Event()

    async def resync(index: int) -> None:
        await synced.wait()

    fleet.resync = resync
    early = asyncio.create_task(fleet.generate(make_request(0), 0))
    await settled()
    builder.built[0].die(BackendError("gone"))
    while 0 in fleet.accepting:
        await asyncio.sleep(0)
    late = await fleet.generate(make_request(1), 0)
    assert late.request_id == "g#1"
    assert [request.id for request in builder.built[1].requests] == ["g#1"]
    synced.set()
    assert (await early).request_id == "g#0"
    assert [request.id for request in builder.built[2].requests] == ["g#0"]


async def test_a_request_that_comes_as_its_replica_begins_to_load_goes_to_another(executor: SerialExecutor) -> None:
    builder = Builder()
    fleet = await started(builder, executor, replicas=2)
    loading = fleet.loading([0])

    async def refuse(request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        loading.__enter__()
        raise BackendError("the replica is loading")

    builder.built[0].generate = refuse  # type: ignore[method-assign]
    assert (await fleet.generate(make_request(0), 0)).request_id == "g#0"
    assert [request.id for request in builder.built[1].requests] == ["g#0"]
    loading.__exit__(None, None, None)


async def test_the_time_for_which_the_fleet_is_paused_is_not_the_requests(
    executor: SerialExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    builder = Builder("hold")
    fleet = await started(builder, executor)
    fleet.timeout_s = 10.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])
    kept, slow = await hold(fleet, builder, 2)
    now[0] += 6.0
    await settled()
    await fleet.pause()
    now[0] += 3600.0  # an update, and a weight sync
    await settled()
    await fleet.resume()
    now[0] += 3.9
    await settled()
    assert not kept.done(), "it was sampled for 9.9 of 10 seconds"
    builder.built[0].waiting[0].set_result(completion_of(make_request(0)))
    assert (await kept).request_id == "g#0"
    now[0] += 0.2
    with pytest.raises(BackendTimeoutError, match=r"request 'g#1' had no completion within 10 s"):
        await slow


async def test_a_replica_that_does_not_answer_a_pause_is_told(executor: SerialExecutor) -> None:
    fleet = await started(Builder("never pause"), executor)
    fleet.timeout_s = 0.01
    message = r"role 'generator', replica 0, pause: no answer within 0\.01 s .*It reports of itself "
    with pytest.raises(BackendTimeoutError, match=message):
        await fleet.pause()


async def test_replicas_that_were_given_up_are_rebuilt_without_weights_and_not_counted(
    executor: SerialExecutor,
) -> None:
    builder = Builder()
    fleet = await started(builder, executor, replicas=2, max_restarts=0)

    async def resync(index: int) -> None:
        raise AssertionError("the trainer is lost")

    fleet.resync = resync
    builder.built[1].die(BackendError("the sender failed"))
    await fleet.rebuild_given_up()
    assert [(generator.index, generator.calls) for generator in builder.built] == [
        (0, ["setup"]),
        (1, ["setup", "close"]),
        (1, ["setup"]),
    ]
    assert (fleet.num_restarts, fleet.resync) == (0, None)


class Weights:
    """Transfers weights to a fleet, and keeps which version each rebuilt replica got."""

    def __init__(self, fleet: LocalFleet, kept: int | None = None) -> None:
        self.fleet = fleet
        self.kept = kept
        """A version that the transport keeps."""
        self.given: list[tuple[int, int]] = []
        self.failures: list[Exception] = []
        self.may_go = asyncio.Event()
        self.may_go.set()

    async def sync(self, version: int) -> None:
        async def transfer() -> list[SyncReceipt]:
            with self.fleet.loading(range(self.fleet.num_replicas)):
                return [SyncReceipt(index, version, "serving") for index in range(self.fleet.num_replicas)]

        await self.fleet.sync(version, transfer, self._transfer_to, lambda version: version == self.kept)

    async def _transfer_to(self, index: int, version: int) -> SyncReceipt:
        await self.may_go.wait()
        if self.failures:
            raise self.failures.pop()
        self.given.append((index, version))
        return SyncReceipt(index, version, "serving")


async def dead_during_updates(
    builder: Builder, executor: SerialExecutor, replicas: int, kept: int | None = None, max_restarts: int = 2
) -> tuple[LocalFleet, Weights, asyncio.Task[Completion]]:
    """A fleet whose replica 0 dies with a request after version 1, while updates change the weights."""
    fleet = await started(builder, executor, replicas=replicas, max_restarts=max_restarts)
    weights = Weights(fleet, kept)
    await weights.sync(1)
    await fleet.hold_rebuilds()
    task = asyncio.create_task(fleet.generate(make_request(0), 0))
    while not builder.built[0].waiting:
        await asyncio.sleep(0)
    builder.built[0].die(BackendError("killed"))
    while fleet.num_restarts == 0 or builder.built[-1].state != "serving":
        await asyncio.sleep(0)
    await settled()
    return fleet, weights, task


async def test_the_last_replica_that_dies_during_updates_serves_their_version(executor: SerialExecutor) -> None:
    builder = Builder("hold", "answer")
    fleet, weights, task = await dead_during_updates(builder, executor, 1)
    assert (weights.given, fleet.accepting, builder.built[1].requests) == ([], frozenset(), [])
    await fleet.release_rebuilds(2)
    assert weights.given == [(0, 2)], "never version 1, which the trainer no longer has"
    assert (await task).request_id == "g#0"
    builder.built[1].die(BackendError("killed, too"))
    await fleet.revive()
    assert weights.given == [(0, 2), (0, 2)]


async def test_another_replica_takes_the_requests_of_one_that_died_during_updates(executor: SerialExecutor) -> None:
    builder = Builder("hold", "answer")
    fleet, weights, task = await dead_during_updates(builder, executor, 2)
    other = builder.built[1]
    while not other.waiting:
        await asyncio.sleep(0)
    other.waiting[0].set_result(completion_of(other.requests[0]))
    assert (await task).request_id == "g#0"
    await fleet.release_rebuilds(2)
    assert (weights.given, fleet.accepting) == ([], {1}), "the sync that follows brings the weights"
    await fleet.restart(0, fleet.replicas[0], BackendError("killed after the updates"))
    assert (weights.given, fleet.accepting) == ([], {1})
    await fleet.restart(1, fleet.replicas[1], BackendError("killed after the updates"))
    assert (weights.given, fleet.accepting) == ([(1, 2)], {1}), "no other replica serves"
    await weights.sync(2)
    assert (weights.given, fleet.accepting) == ([(1, 2)], {0, 1})


async def test_a_version_that_the_transport_keeps_reaches_a_replica_during_updates(executor: SerialExecutor) -> None:
    builder = Builder("hold", "answer")
    fleet, weights, task = await dead_during_updates(builder, executor, 1, kept=1)
    assert (await task).request_id == "g#0"
    await fleet.release_rebuilds(2)
    builder.built[1].die(BackendError("killed, too"))
    await fleet.revive()
    assert weights.given == [(0, 1), (0, 1)]


async def test_updates_begin_after_the_transfer_to_a_rebuilt_replica(executor: SerialExecutor) -> None:
    builder = Builder("hold", "answer")
    fleet = await started(builder, executor)
    weights = Weights(fleet)
    await weights.sync(1)
    weights.may_go.clear()
    [task] = await hold(fleet, builder, 1)
    builder.built[0].die(BackendError("killed"))
    while len(builder.built) < 2 or builder.built[1].state != "serving":
        await asyncio.sleep(0)
    await settled()
    held = asyncio.create_task(fleet.hold_rebuilds())
    await settled()
    assert not held.done()
    weights.may_go.set()
    await held
    assert weights.given == [(0, 1)]
    await task


async def test_a_request_that_waits_too_long_for_the_updates_says_so(executor: SerialExecutor) -> None:
    fleet, _, task = await dead_during_updates(Builder("hold", "answer"), executor, 1)
    fleet.timeout_s = 0.01
    with pytest.raises(BackendTimeoutError) as caught:
        await fleet.generate(make_request(1))
    assert str(caught.value).endswith(
        "within 0.01 s (roles.generator.timeout_s): replica 0 waits for the next version. Raise it, or "
        "choose a weight sync that keeps each version (weight_sync.backend: checkpoint)"
    )
    fleet.timeout_s = 30.0
    await fleet.release_rebuilds(2)
    await task


async def test_a_replica_that_fails_to_take_the_weights_after_updates_costs_another_restart(
    executor: SerialExecutor,
) -> None:
    builder = Builder("hold", "answer")
    fleet, weights, task = await dead_during_updates(builder, executor, 1)
    weights.failures = [BackendError("the link broke")]
    await fleet.release_rebuilds(2)
    assert (fleet.num_restarts, weights.given, len(builder.built)) == (2, [(0, 2)], 3)
    await task
    fleet, weights, task = await dead_during_updates(Builder("hold", "answer"), executor, 1)
    weights.failures = [TrainerLostError("rank 0 died")]
    with pytest.raises(TrainerLostError):
        await fleet.release_rebuilds(2)
    assert fleet.num_restarts == 1
    task.cancel()
