"""The runtime on a real Ray, with light backends: what is split, gathered, routed, refused and repaired."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatlearn_core.exceptions import (
    BackendError,
    BackendTimeoutError,
    ConfigError,
    PluginIncompatibleError,
    ReplicaLostError,
    TrainerLostError,
)
from chatlearn_core.runtime.plan import RunPlan
from chatlearn_core.types import (
    Completion,
    GenerateRequest,
    OutputRequest,
    Prompt,
    Sample,
    SamplingParams,
    TrainBatch,
    pack_samples,
)
from chatlearn_ray.options import RayRuntimeOptions
from chatlearn_ray.runtime import RayRuntime

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.usefixtures("ray_session", "leaves_nothing")]


@asynccontextmanager
async def running(plan: RunPlan, **options: Any) -> AsyncIterator[RayRuntime]:
    runtime = RayRuntime(RayRuntimeOptions.model_validate(options), plan)
    await runtime.start()
    try:
        yield runtime
    finally:
        await runtime.close()


def request(name: str, group: str = "g", max_tokens: int = 4) -> GenerateRequest:
    return GenerateRequest(name, np.arange(3), SamplingParams(max_tokens=max_tokens), group)


def samples(count: int) -> list[Sample]:
    prompt = Prompt("p", np.arange(1), "")
    tokens = np.arange(1000)
    return [
        Sample(f"s{i}", f"g{i // 2}", prompt, tokens[: 2 + i * 7 % 11] + 100 * i, tokens[: 2 + i * 7 % 11] > 0)
        for i in range(count)
    ]


def batch(count: int) -> TrainBatch:
    return pack_samples(samples(count))


def loss(factor: float) -> Any:
    import chatlearn_ray_test_backends as backends

    return backends.CountingLoss(factor)


async def answered(runtime: RayRuntime, asked: GenerateRequest) -> Completion:
    """What the generator answers, with plain arrays."""
    [plain] = await runtime.data.aget_completions([await runtime.generator("generator").generate(asked)])
    return plain


async def sees_every_sample_once(runtime: RayRuntime, count: int) -> None:
    trainer = runtime.trainer("trainer")
    whole = batch(count)
    metrics = await trainer.update(whole, loss(3.0))
    assert metrics["sequences"].value == count
    assert metrics["token_ids"].value == float(whole.token_ids.sum())
    assert metrics["loss_called"].value == 3.0
    held = [whole.token_ids, whole.loss_mask, whole.unit_index, whole.group_index]
    assert metrics["perf/object_store_bytes"].value >= sum(tensor.nbytes for tensor in held)
    outputs = runtime.data.get_tensors(await trainer.compute(whole, OutputRequest(frozenset({"logprobs", "scores"}))))
    assert outputs["logprobs"].tolist() == (whole.token_ids * -2).tolist()
    assert outputs["scores"].tolist() == whole.token_ids[whole.cu_seqlens[:-1].long()].tolist()


async def test_a_trainer_of_four_ranks_sees_every_sample_once(roles: Any) -> None:
    role = roles.role("trainer", "trainer", "counting", ranks=4)
    async with running(roles.plan(role)) as runtime:
        for count in (13, 1):
            await sees_every_sample_once(runtime, count)


async def test_a_model_parallel_group_counts_once(roles: Any) -> None:
    role = roles.role("trainer", "trainer", "counting", ranks=2, model_parallel=2)
    async with running(roles.plan(role)) as runtime:
        await sees_every_sample_once(runtime, 5)


async def test_one_cluster_life(roles: Any, tmp_path: Path) -> None:
    """All roles at once: checkpoints of every rank, routing, requests in order, rewards elsewhere, who sits where."""
    plan = roles.plan(
        roles.role("trainer", "trainer", "counting", ranks=2),
        roles.role("generator", "generator", "echo", replicas=2),
        roles.role("reward", "reward", "where", replicas=2),
    )
    async with running(plan) as runtime:
        await runtime.trainer("trainer").save(tmp_path / "saved")
        pids = {path.read_text() for path in (tmp_path / "saved").iterdir()}
        assert len(pids) == 2
        assert str(os.getpid()) not in pids
        await runtime.trainer("trainer").load(tmp_path / "saved")

        fleet = runtime.generator("generator")
        names = [f"r{i}" for i in range(20)]
        answers = await asyncio.gather(*(answered(runtime, request(name, group="one")) for name in names))
        assert [a.request_id for a in answers] == names
        assert len({float(a.logprobs[0]) for a in answers}) == 1, "a group stays on one replica"
        assert answers[-1].text == ",".join(names), "requests of one turn arrive in their order"
        groups = await asyncio.gather(*(answered(runtime, request(f"q{i}", group=str(i))) for i in range(12)))
        assert len({float(a.logprobs[0]) for a in groups}) == 2
        assert fleet.policy_version == 3

        with pytest.raises(BackendError, match=r"role 'generator', replica \d.*generate\(bad\): ValueError: thirteen"):
            await fleet.generate(request("bad", max_tokens=13))
        assert fleet.num_restarts == 0, "a request that fails kills no replica"

        judged = await runtime.reward("reward").score(samples(3))
        again = await runtime.reward("reward").score(samples(3))
        assert [r.components["tokens"] for r in judged] == [float(len(s.token_ids)) for s in samples(3)]
        assert len({judged[0].value, again[0].value, float(os.getpid())}) == 3, "user code never runs in the driver"

        place = runtime.describe()["trainer"]["places"][1]
        assert place.startswith("rank 1 of 2: role 'trainer', slot 1: 1 CPU -> process ")


async def test_a_killed_replica_is_rebuilt_and_its_requests_start_again(roles: Any, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.touch()
    role = roles.role("generator", "generator", "echo", delay_file=str(slow))
    async with running(roles.plan(role), max_generator_restarts=1) as runtime:
        fleet = runtime.generator("generator")
        synced: list[int] = []

        async def resync(index: int) -> None:
            synced.append(index)

        fleet.resync = resync
        first = fleet.replicas[0].worker.facts.pid
        waiting = asyncio.gather(*(answered(runtime, request(f"r{i}")) for i in range(5)))
        await asyncio.sleep(0.5)
        os.kill(first, signal.SIGKILL)
        slow.unlink()
        answers = await waiting
        assert [a.request_id for a in answers] == [f"r{i}" for i in range(5)]
        assert {-float(a.logprobs[0]) for a in answers} == {float(fleet.replicas[0].worker.facts.pid)} != {float(first)}
        assert synced == [0], "it takes the current weights before it serves"
        assert fleet.num_restarts == 1

        os.kill(fleet.replicas[0].worker.facts.pid, signal.SIGKILL)
        with pytest.raises(ReplicaLostError, match=r"1 restart\(s\), the limit \(runtime.options.max_generator"):
            await fleet.generate(request("late"))


async def test_a_killed_reward_worker_is_rebuilt_and_its_call_repeated(roles: Any, tmp_path: Path) -> None:
    trap = tmp_path / "die"
    trap.touch()
    role = roles.role("reward", "reward", "where", die_once=str(trap))
    async with running(roles.plan(role), max_reward_restarts=1) as runtime:
        results = await runtime.reward("reward").score(samples(3))
        assert [r.components["tokens"] for r in results] == [float(len(s.token_ids)) for s in samples(3)]
        trap.touch()
        with pytest.raises(BackendError, match=r"'reward': worker 0 died, and 1 restart\(s\), the limit"):
            await runtime.reward("reward").score(samples(1))


async def test_a_reward_that_blocks_costs_the_samples_that_block_and_shows_where(
    roles: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chatlearn_workers.remote.GRACE_S", 2.0)
    role = roles.role("reward", "reward", "where", timeout_s=3.0, block_s=60.0)
    async with running(roles.plan(role), max_reward_restarts=0) as runtime:
        results = await runtime.reward("reward").score(samples(3))
        assert [r.error is None for r in results] == [True, False, True]
        assert "role 'reward', worker 0 (process" in results[1].error
        assert "time.sleep(self.options.block_s)" in results[1].error
        assert runtime.reward("reward").num_restarts == 0, "that was the sample's doing"


async def test_a_sample_that_kills_its_worker_is_identified_and_the_run_continues(roles: Any) -> None:
    role = roles.role("reward", "reward", "where", die_on="s1")
    told: list[str] = []
    async with running(roles.plan(role), max_reward_restarts=1) as runtime:
        runtime.on_event = lambda event: told.append(event.name)
        group = runtime.reward("reward")
        first, other = await asyncio.gather(group.score(samples(3)), group.score(samples(5)[3:]))
        assert [r.error is None for r in first] == [True, False, True]
        assert "score: the process is gone" in first[1].error
        assert [r.error for r in other] == [None, None], "a call beside it is made again"
        assert group.num_restarts == 0
    assert set(told) == {"reward_worker_rebuilt"}


async def test_a_slow_request_times_out_and_the_replica_lives_on(roles: Any, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.touch()
    role = roles.role("generator", "generator", "echo", delay_file=str(slow))
    async with running(roles.plan(role)) as runtime:
        fleet = runtime.generator("generator")
        fleet.timeout_s = 1.0
        with pytest.raises(BackendTimeoutError, match=r"replica 0 .*request 'r0' had no completion within 1 s"):
            await fleet.generate(request("r0"))
        slow.unlink()
        fleet.timeout_s = 60.0
        assert (await answered(runtime, request("r1"))).text == "r0,abort r0,r1", "no call waits for r0: it is aborted"
        assert fleet.num_restarts == 0


async def test_a_replica_that_hangs_is_rebuilt_and_its_requests_start_again(
    roles: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chatlearn_workers.remote.GRACE_S", 1.0)
    monkeypatch.setattr("chatlearn_workers.generator_fleet._STATUS_S", 0.5)
    trap = tmp_path / "hang"
    trap.touch()
    told: list[str] = []
    role = roles.role("generator", "generator", "echo", timeout_s=5.0, hang_once=str(trap))
    async with running(roles.plan(role), max_generator_restarts=1) as runtime:
        runtime.on_event = lambda event: told.append(event.text)
        fleet = runtime.generator("generator")
        answers = await asyncio.gather(*(fleet.generate(request(f"r{i}")) for i in range(3)))
        assert [a.request_id for a in answers] == ["r0", "r1", "r2"]
        assert fleet.num_restarts == 1
    [text] = told
    assert "had no completion within 5 s" in text
    assert "time.sleep(3600)" in text, "the stack of what hung"


async def test_a_repeated_request_does_not_get_the_first_answer(roles: Any, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.touch()
    role = roles.role("generator", "generator", "echo", delay_file=str(slow))
    async with running(roles.plan(role)) as runtime:
        fleet = runtime.generator("generator")
        first = asyncio.create_task(fleet.generate(request("same")))
        await asyncio.sleep(0.3)
        first.cancel()
        again = replace(request("same", max_tokens=5), prompt_ids=np.arange(5))
        waiting = asyncio.create_task(answered(runtime, again))
        await asyncio.sleep(0.3)
        slow.unlink()  # both come back, the first one first
        assert (await waiting).token_ids.tolist() == [0, 1, 2, 3, 4]


async def test_a_request_that_resumes_from_lost_tokens_is_the_runs_matter_and_kills_no_replica(roles: Any) -> None:
    import ray

    def lose() -> None:
        raise RuntimeError("this object is not there")

    role = roles.role("generator", "generator", "echo")
    async with running(roles.plan(role), max_generator_restarts=0) as runtime:
        fleet = runtime.generator("generator")
        first = await fleet.generate(replace(request("first", max_tokens=1000), prompt_ids=np.arange(1000)))
        first.token_ids.pieces[0].block.reference = ray.remote(lose).remote()
        again = replace(request("again", max_tokens=1003), resume_from=first)
        with pytest.raises(TrainerLostError, match="sampled tokens were lost with the node that held them"):
            await fleet.generate(again)
        assert (await answered(runtime, request("other"))).text == "first,other"
        assert fleet.num_restarts == 0


async def test_a_killed_rank_breaks_its_group_which_can_be_rebuilt(roles: Any) -> None:
    role = roles.role("trainer", "trainer", "counting", ranks=2)
    async with running(roles.plan(role), max_trainer_restarts=1) as runtime:
        trainer = runtime.trainer("trainer")
        os.kill(trainer.workers[1].facts.pid, signal.SIGKILL)
        with pytest.raises(
            TrainerLostError, match=r"role 'trainer', rank 1 of 2 \(process .*update: the process is"
        ) as lost:
            await trainer.update(batch(4), loss(1.0))
        with pytest.raises(TrainerLostError, match="role 'trainer' cannot save: it is broken since update failed"):
            await trainer.save(Path("anywhere"))
        await runtime.recover(lost.value)
        assert (await trainer.update(batch(4), loss(1.0)))["sequences"].value == 4
        os.kill(trainer.workers[0].facts.pid, signal.SIGKILL)
        with pytest.raises(TrainerLostError, match="rank 0 of 2") as lost:
            await trainer.update(batch(4), loss(1.0))
        with pytest.raises(TrainerLostError, match=r"a rank died, and 1 restart\(s\), the limit"):
            await runtime.recover(lost.value)


async def test_a_hung_call_shows_where_it_hangs(roles: Any) -> None:
    role = roles.role("trainer", "trainer", "counting", ranks=2, timeout_s=5.0, hang_rank=1)
    async with running(roles.plan(role)) as runtime:
        with pytest.raises(TrainerLostError) as error:
            await runtime.trainer("trainer").update(batch(4), loss(1.0))
        text = str(error.value)
        place = error.value.place
        assert (place.role, place.worker, place.method) == ("trainer", "rank 1 of 2", "update")
        assert place.process == runtime.trainer("trainer").workers[1].facts.pid
        assert "time.sleep(3600)" in error.value.stack
        assert "role 'trainer', rank 1 of 2 (process" in text
        assert "update did not return within 5 s (roles.trainer.timeout_s)" in text
        assert "time.sleep(3600)" in text


async def test_a_stopped_process_is_reported_by_the_driver(roles: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chatlearn_workers.remote._STACK_WAIT_S", 0.5)
    role = roles.role("trainer", "trainer", "counting", timeout_s=1.0)
    async with running(roles.plan(role)) as runtime:
        worker = runtime.trainer("trainer").workers[0]
        os.kill(worker.facts.pid, signal.SIGSTOP)
        try:
            with pytest.raises(TrainerLostError, match=r"rank 0 of 1 .*no answer within 6 s.*does not even say"):
                await runtime.trainer("trainer").update(batch(2), loss(1.0))
        finally:
            os.kill(worker.facts.pid, signal.SIGCONT)


async def test_an_error_of_one_rank_names_it_with_its_traceback(roles: Any) -> None:
    role = roles.role("trainer", "trainer", "counting", ranks=2, fail_rank=1)
    async with running(roles.plan(role)) as runtime:
        with pytest.raises(BackendError) as error:
            await runtime.trainer("trainer").update(batch(4), loss(1.0))
        text = str(error.value)
        assert text.startswith("role 'trainer', rank 1 of 2 (process")
        assert "RuntimeError: the optimizer is upset" in text
        assert "fake_backends.py" in text or "chatlearn_ray_test_backends.py" in text
        assert "in update" in text


async def test_a_version_that_differs_is_refused_by_the_worker(roles: Any) -> None:
    role = roles.role("reward", "reward", "where")
    entries = tuple(replace(e, version="0.9") if e.name == "where" else e for e in roles.registry.entries)
    plan = replace(roles.plan(role), registry=replace(roles.registry, entries=entries))
    runtime = RayRuntime(RayRuntimeOptions(), plan)
    with pytest.raises(
        PluginIncompatibleError, match=r"backends 0\.9 on the driver .* backends 1\.0 on worker|1\.0 on"
    ):
        await runtime.start()


async def test_a_role_that_does_not_start_closes_the_others(roles: Any) -> None:
    import ray

    plan = roles.plan(
        roles.role("generator", "generator", "echo"), roles.role("trainer", "trainer", "counting", refuse=True)
    )
    runtime = RayRuntime(RayRuntimeOptions(), plan)
    with pytest.raises(ConfigError, match="role 'trainer', rank 0 of 1, setup: the trainer refuses to start"):
        await runtime.start()
    async with asyncio.timeout(60):
        while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
            await asyncio.sleep(0.1)  # places are given back in the background


async def test_a_run_that_cannot_fit_is_refused_before_anything_starts(roles: Any) -> None:
    role = roles.role("trainer", "trainer", "counting", ranks=2)
    runtime = RayRuntime(RayRuntimeOptions.model_validate({"roles": {"trainer": {"cpus": 40}}}), roles.plan(role))
    with pytest.raises(BackendError, match=r"CPU: 80 \(role 'trainer'\) = 80, but 1 node\(s\) have 32: 48 missing"):
        await runtime.start()


async def test_a_wait_for_resources_says_what_is_missing(roles: Any) -> None:
    holder = roles.role("generator", "generator", "echo")
    asker = roles.role("trainer", "trainer", "counting")
    async with running(roles.plan(holder), roles={"generator": {"cpus": 30}}):
        options = RayRuntimeOptions.model_validate({"roles": {"trainer": {"cpus": 20}}, "resource_wait_s": 2})
        with pytest.raises(
            BackendError, match=r"role 'trainer' has been waiting for its place for \d+ s; free .* needs 20 CPU"
        ):
            await RayRuntime(options, roles.plan(asker)).start()
