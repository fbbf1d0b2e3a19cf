"""The contract of a runtime: equal results wherever roles run, reported failures, and no processes left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from chatlearn_core.exceptions import (
    BackendError,
    BackendTimeoutError,
    ChatLearnError,
    ConfigError,
    ReplicaLostError,
    TrainerLostError,
    UnfetchedError,
    WeightSyncError,
)
from chatlearn_core.plugins.records import Kind
from chatlearn_core.protocols import Runtime
from chatlearn_core.types import TrainBatch, pack_samples, per_sequence
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.batches import LENGTHS, MaskedPolicyLoss
from chatlearn_testing.fakes.bigram import TRANSITION, UNIGRAM, build_bigram_model, read_bigram_tensors
from chatlearn_testing.leftovers import Leftovers
from chatlearn_testing.process_state import ENVIRONMENT, FUNCTIONS
from chatlearn_testing.suites.conformance_suite import ConformanceSuite
from chatlearn_testing.suites.runtime_fixtures import (
    LOGPROBS,
    VOCAB_SIZE,
    RuntimeFixtures,
    Stand,
    WaitingLoss,
    blocking_file,
    doubled,
    generated,
    kill_replica,
    prepared,
    process_of,
    request,
    samples_of,
    tokens,
)

NAMES = tuple(f"request-{number}" for number in range(6))
SHORT_S = 1.0
"""Timeout of a role that a test makes hang, seconds."""
SLOW_S = 0.05
"""Time per token of a slow generator, seconds, so that requests are still open when a test kills their replica."""
LOSS = MaskedPolicyLoss()
ROLES: dict[str, Kind] = {"trainer": "trainer", "generator": "generator", "reward": "reward"}


class RuntimeConformance(RuntimeFixtures, ConformanceSuite):
    """Contract tests that every runtime must pass, with the kit's fakes as roles. A subclass sets ``backend``.

    A runtime whose record declares ``placement="process"`` hosts one rank per role. Tests that need several ranks, or
    that kill a worker process, do not apply to it.
    """

    kind: ClassVar[Kind] = "runtime"
    patience_s: ClassVar[float] = 240.0
    may_change: ClassVar[frozenset[str]] = frozenset({FUNCTIONS, ENVIRONMENT})
    """A framework of processes prints its workers' output, and notes in the environment where they meet."""

    @classmethod
    def hosts_processes(cls) -> bool:
        """Whether roles run in processes of their own."""
        return bool(cls.record().placement != "process")

    def require_processes(self, what: str) -> None:
        """Skip the test if the runtime has no worker processes; ``what`` needs them."""
        if not self.hosts_processes():
            not_applicable(f"{what} needs worker processes; the record declares placement='process'")

    def test_is_a_runtime(self, stand: Stand) -> None:
        """The object has every method of ``Runtime`` and reports places, devices and backends before ``start``."""

        async def test() -> None:
            runtime = stand.build(stand.plan(stand.role("policy", "trainer"), stand.role("sampler", "generator")))
            assert isinstance(runtime, Runtime), "a method of Runtime is missing"
            described = runtime.describe()
            assert {name: (d["kind"], d["backend"]) for name, d in described.items()} == {
                "policy": ("trainer", "fake"),
                "sampler": ("generator", "fake"),
            }
            json.dumps(dict(described))
            assert all(runtime.devices()[role] for role in ("policy", "sampler"))

        self.run(stand, test)

    def test_one_rank_gives_the_bits_of_the_local_runtime(self, stand: Stand) -> None:
        """Three steps of generation, rewards, logprobs, updates and weight syncs give the same tokens, logprobs,
        rewards, metrics and weights as the local runtime, bit for bit.

        Usual causes: requests are submitted in another order than they were called, workers use another number of
        threads, or arrays change dtype in transit.
        """

        async def test() -> None:
            roles = [stand.role(name, kind) for name, kind in ROLES.items()]
            local = stand.local_runtime(*roles)
            await local.start()
            expected = await three_steps(local, stand.run_dir / "expected")
            await local.close()
            found = await three_steps(await stand.start(*roles, num_threads=1), stand.run_dir / "found")
            for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
                for name, value in theirs.items():
                    assert ours[name] == value, f"{name} of step {step} differs"

        self.run(stand, test)

    def test_a_trainer_follows_another(self, stand: Stand, tmp_path: Path) -> None:
        """After two ``refresh_weights``, a follower with decay 0 equals the policy bit for bit; with decay d it holds
        d^2 own + d (1 - d) first + (1 - d) second, for any numbers of ranks.

        Part of the policy is missing: a rank sends only its own rows, or a rank of the follower took none.
        """
        if not self.record().refreshes:
            not_applicable("the record does not declare 'refreshes'")

        async def test() -> None:
            sending, fewer, more = (2, 1, 3) if self.hosts_processes() else (1, 1, 1)
            own = build_bigram_model(tmp_path / "own", vocab_size=VOCAB_SIZE, seed=7)
            decays = {"reference": 0.0, "average": 0.75}
            followers = [
                stand.following(stand.role(name, "trainer", ranks=ranks, model=own), "policy", decays[name])
                for name, ranks in (("reference", fewer), ("average", more))
            ]
            runtime = await stand.start(stand.role("policy", "trainer", ranks=sending), *followers)
            start = {name: tensor.double() for name, tensor in read_bigram_tensors(own).items()}
            expected = {role: dict(start) for role in decays}
            for step in (1, 2):
                await runtime.trainer("policy").update(prepared((5, 8, 6), seed=step), MaskedPolicyLoss())
                await runtime.trainer("policy").export_model(tmp_path / f"policy{step}")
                sent = read_bigram_tensors(tmp_path / f"policy{step}")
                for role, decay in decays.items():
                    assert await runtime.refresh_weights("policy", role, step), "no weights were moved"
                    await runtime.trainer(role).export_model(tmp_path / f"{role}{step}")
                    found = read_bigram_tensors(tmp_path / f"{role}{step}")
                    for name, tensor in sent.items():
                        mean = decay * expected[role][name] + (1 - decay) * tensor.double()
                        expected[role][name] = mean
                        torch.testing.assert_close(found[name].double(), mean, rtol=1e-6, atol=1e-6, msg=name)
                        assert decay or torch.equal(found[name], tensor), name

        self.run(stand, test)

    def test_a_follower_of_another_model_takes_nothing(self, stand: Stand, tmp_path: Path) -> None:
        """Refreshing from another model raises a ``WeightSyncError`` that names both roles; the follower keeps its
        weights.
        """
        if not self.record().refreshes:
            not_applicable("the record does not declare 'refreshes'")

        async def test() -> None:
            other = build_bigram_model(tmp_path / "other", vocab_size=VOCAB_SIZE + 1)
            follower = stand.following(stand.role("reference", "trainer", model=other), "policy", 0.0)
            runtime = await stand.start(stand.role("policy", "trainer"), follower)
            with pytest.raises(WeightSyncError, match=r"'policy'.*'reference'"):
                await runtime.refresh_weights("policy", "reference", 1)
            await runtime.trainer("reference").export_model(tmp_path / "after")
            found, own = read_bigram_tensors(tmp_path / "after"), read_bigram_tensors(other)
            assert all(torch.equal(found[name], tensor) for name, tensor in own.items())

        self.run(stand, test)

    def test_values_are_got_by_sample_and_field(self, stand: Stand) -> None:
        """``Runtime.data`` returns the requested fields in the order of the samples, equal to plain arrays. Reading a
        reference that was not fetched raises an error that names the field and the sample.
        """

        async def test() -> None:
            roles = [stand.role(name, kind) for name, kind in ROLES.items()]
            runtime = await stand.start(*roles)
            completions = await generated(runtime, NAMES)
            samples, expected = samples_of(completions), samples_of(runtime.data.get_completions(completions))
            batch = pack_samples(samples)
            outputs = await runtime.trainer("trainer").compute(batch, LOGPROBS)
            computed = per_sequence(outputs["logprobs"], batch.lengths, batch.sample_ids, "trainer_logprobs")
            for sample, array in zip(samples, computed, strict=True):
                sample.token_data["trainer_logprobs"] = array
            for sample, other in zip(runtime.data.get(samples, {"token_ids"}), samples, strict=True):
                assert sample.id == other.id, "samples come in another order than requested"
                assert type(sample.token_ids) is np.ndarray
                assert sample.turns is other.turns
                for name, values in other.token_data.items():
                    assert sample.token_data[name] is values, f"{name} was not requested"
            for sample, other in zip(runtime.data.get(samples), expected, strict=True):
                assert sample.token_ids.tolist() == other.token_ids.tolist()
                assert sample.text == other.text
                for name, values in other.token_data.items():
                    assert sample.token_data[name].tolist() == values.tolist(), name
            rows = np.concatenate([s.token_data["trainer_logprobs"] for s in runtime.data.get(samples)])
            assert rows.tolist() == runtime.data.get_tensors(outputs)["logprobs"].tolist()
            for sample in samples:
                if not isinstance(sample.token_ids, np.ndarray):
                    with pytest.raises(UnfetchedError, match=f"'token_ids' of '{sample.id}'"):
                        np.asarray(sample.token_ids)
            with pytest.raises(BackendError, match="'no-such-field'"):
                runtime.data.get(samples, {"no-such-field"})

        self.run(stand, test)

    def test_ranks_split_a_batch_and_merge_metrics_by_name(self, stand: Stand) -> None:
        """Every sequence is on exactly one data-parallel rank, and outputs have the order of the batch. Sums and means
        cover the whole batch, and a metric that only one rank reports counts once. A rank may have no sequence.
        """
        self.require_processes("a trainer with several ranks")

        async def test() -> None:
            one = await stand.start(stand.role("trainer", "trainer"))
            several = await stand.start(stand.role("trainer", "trainer", ranks=2))
            for lengths in (LENGTHS, (5,)):
                batch = prepared(lengths)
                for split, num_parts in (("group", min(2, len(lengths))), ("batch", 1)):
                    derived = await several.trainer("trainer").derive(batch, doubled, split)
                    total = derived.metrics["token_ids"].value
                    assert total == float(batch.token_ids.sum()), "a sequence was lost, or is on two ranks"
                    doubled_ids = several.data.get_tensors(derived.token_data)["doubled"]
                    assert doubled_ids.tolist() == (2.0 * batch.token_ids).tolist()
                    assert derived.sequence_data["length"].tolist() == list(lengths)
                    assert len(derived.exclusions) == num_parts
                whole, parts = [await logprobs(runtime, batch) for runtime in (one, several)]
                assert np.allclose(whole, parts, atol=1e-6), "outputs are not in the order of the batch"
                metrics = [await runtime.trainer("trainer").update(batch, LOSS) for runtime in (one, several)]
                for name in ("loss", "policy/logprob", "grad_norm", "lr"):
                    expected, found = (by_name[name] for by_name in metrics)
                    assert found.value == pytest.approx(expected.value, rel=1e-5), name
                    assert found.reducer == "sum" or found.count == expected.count, f"{name} counts twice"

        self.run(stand, test)

    def test_more_ranks_than_it_hosts_are_refused_before_start(self, stand: Stand) -> None:
        """A runtime with a single process raises when it is built, and names the role and its number of ranks."""
        if self.hosts_processes():
            not_applicable("it hosts several ranks")

        async def test() -> None:
            with pytest.raises(ConfigError, match=r"roles\.trainer\.ranks is 2"):
                stand.build(stand.plan(stand.role("trainer", "trainer", ranks=2)))

        self.run(stand, test)

    def test_weights_reach_every_replica(self, stand: Stand) -> None:
        """After ``sync_weights`` every replica serves the new version and its greedy output matches the trainer's
        exported weights; one receipt per replica confirms this.
        """

        async def test() -> None:
            runtime = await stand.start(
                stand.role("trainer", "trainer", ranks=2 if self.hosts_processes() else 1),
                stand.role("generator", "generator", replicas=2),
            )
            trainer, fleet = runtime.trainer("trainer"), runtime.generator("generator")
            for version in (1, 2):
                await trainer.update(prepared(LENGTHS, version), LOSS)
                receipts = await runtime.sync_weights("trainer", "generator", version)
                assert [(r.replica, r.state, r.policy_version) for r in receipts] == [
                    (replica, "serving", version) for replica in range(2)
                ]
                assert fleet.policy_version == version
                await trainer.export_model(stand.run_dir / f"exported-{version}")
                expected = greedy_tokens(stand.run_dir / f"exported-{version}")
                for replica in range(2):
                    completion = await fleet.generate(request("greedy", temperature=0.0), replica)
                    assert tokens(runtime, [completion]) == [expected], f"replica {replica} serves other weights"
                    assert completion.version_spans[-1].version == version

        self.run(stand, test)

    def test_a_dead_replica_is_reported_and_its_requests_start_again(self, stand: Stand) -> None:
        """A dead replica is restarted once, however many requests it had, and takes the current weights before it
        serves. Every request ends with the tokens of an undisturbed run. An event reports the restart with role,
        worker, number and limit.
        """

        async def test() -> None:
            runtime = await stand.start(
                stand.role("trainer", "trainer"),
                stand.role("generator", "generator", replicas=2, seconds_per_token=SLOW_S),
                max_generator_restarts=1,
            )
            await runtime.trainer("trainer").update(prepared(LENGTHS), LOSS)
            await runtime.sync_weights("trainer", "generator", 1)
            expected = tokens(runtime, await generated(runtime, NAMES))
            assert not stand.events
            fleet = runtime.generator("generator")
            waiting = asyncio.gather(*(fleet.generate(request(name), 0) for name in NAMES))
            await asyncio.sleep(4 * SLOW_S)
            await kill_replica(runtime, "generator", 0)
            completions = await waiting
            assert tokens(runtime, completions) == expected
            assert {span.version for c in completions for span in c.version_spans} == {1}
            [event] = stand.events
            facts = {"role": "generator", "worker": "replica 0", "restart": 1, "limit": 1}
            assert dict(event.facts).items() >= facts.items(), event
            assert "'generator'" in event.text, event.text

        self.run(stand, test)

    def test_weights_are_lent_to_a_replica_that_comes_late(self, stand: Stand) -> None:
        """A replica that is rebuilt between two syncs gets the trainer's weights while ``lend_weights`` keeps them on
        their devices: another role may have taken the trainer's place meanwhile.
        """
        lent: list[str] = []

        @contextlib.asynccontextmanager
        async def lend(role: str) -> AsyncIterator[None]:
            lent.append(role)
            yield

        async def test() -> None:
            roles = stand.role("trainer", "trainer"), stand.role("generator", "generator", replicas=2)
            runtime = stand.build(stand.plan(*roles), max_generator_restarts=1)
            runtime.lend_weights = lend
            await runtime.start()
            await runtime.trainer("trainer").update(prepared(LENGTHS), LOSS)
            await runtime.sync_weights("trainer", "generator", 1)
            lent.clear()
            await kill_replica(runtime, "generator", 0)
            completion = await runtime.generator("generator").generate(request("late"), 0)
            assert {span.version for span in completion.version_spans} == {1}
            assert lent == ["trainer"], f"weights moved while these were lent: {lent}"

        self.run(stand, test)

    def test_a_dead_replica_beyond_its_limit_is_refused(self, stand: Stand) -> None:
        """The error names the role, the replica, the number of restarts used and the setting that limits them."""
        if "max_generator_restarts" not in self.options_model().model_fields:
            not_applicable("the runtime has no option max_generator_restarts")

        async def test() -> None:
            runtime = await stand.start(stand.role("generator", "generator"), max_generator_restarts=0)
            await kill_replica(runtime, "generator", 0)
            with pytest.raises(ReplicaLostError, match=r"'generator': replica 0 died, and 0 restart\(s\)") as caught:
                await generated(runtime, NAMES)
            assert "runtime.options.max_generator_restarts" in str(caught.value)

        self.run(stand, test)

    def test_a_lost_rank_is_rebuilt_and_goes_on_from_what_was_saved(self, stand: Stand) -> None:
        """After a rank is lost, the current and every later call raise ``TrainerLostError``. ``recover`` rebuilds all
        ranks, and after ``load`` the next update equals that of an undisturbed run.
        """

        async def test() -> None:
            ranks = 2 if self.hosts_processes() else 1
            runtime = await stand.start(stand.role("trainer", "trainer", ranks=ranks), max_trainer_restarts=1)
            trainer = runtime.trainer("trainer")
            await trainer.update(prepared(LENGTHS, 1), LOSS)
            await trainer.save(stand.run_dir / "saved")
            if not self.hosts_processes():
                lost = TrainerLostError("the suite says so")
                with pytest.raises(TrainerLostError) as caught:
                    await runtime.recover(lost)
                assert caught.value is lost
                return
            expected = await trainer.update(prepared(LENGTHS, 2), LOSS)
            process = process_of(runtime, "trainer", 1)
            assert process is not None, "describe() names no process"
            os.kill(process, signal.SIGKILL)
            with pytest.raises(TrainerLostError, match=r"role 'trainer', rank \d of 2"):
                await trainer.update(prepared(LENGTHS, 3), LOSS)
            with pytest.raises(TrainerLostError, match="role 'trainer'") as again:
                await trainer.save(stand.run_dir / "never")
            await runtime.recover(again.value)
            assert [event.facts["role"] for event in stand.events] == ["trainer"]
            await trainer.load(stand.run_dir / "saved")
            found = await trainer.update(prepared(LENGTHS, 2), LOSS)
            assert found["loss"].value == expected["loss"].value, "the trainer does not continue from the checkpoint"

        self.run(stand, test)

    def test_a_call_that_hangs_ends_by_its_timeout(self, stand: Stand, tmp_path: Path) -> None:
        """The error names the role, the method and the setting, and shows where the call hangs."""

        async def test() -> None:
            runtime = await stand.start(stand.role("trainer", "trainer", timeout_s=SHORT_S))
            with blocking_file(tmp_path) as file, pytest.raises(BackendError) as caught:
                await runtime.trainer("trainer").update(prepared(LENGTHS), WaitingLoss(path=file))
            assert isinstance(caught.value, BackendTimeoutError | TrainerLostError)
            for part in ("role 'trainer'", "update", "1 s", "roles.trainer.timeout_s", "time.sleep"):
                assert part in str(caught.value), f"{part!r} is not in: {caught.value}"

        self.run(stand, test)

    def test_a_request_that_takes_too_long_ends_by_its_timeout(self, stand: Stand) -> None:
        """The error names the role, the replica, the request and the setting; the replica is not restarted."""

        async def test() -> None:
            slow = stand.role("generator", "generator", timeout_s=SHORT_S, seconds_per_token=60.0)
            runtime = await stand.start(slow, max_generator_restarts=0)
            with pytest.raises(BackendTimeoutError) as caught:
                await generated(runtime, NAMES[:1])
            for part in ("role 'generator'", "replica 0", NAMES[0], "1 s", "roles.generator.timeout_s"):
                assert part in str(caught.value), f"{part!r} is not in: {caught.value}"

        self.run(stand, test)

    def test_a_reward_that_takes_too_long_costs_its_samples(self, stand: Stand) -> None:
        """``score`` returns one result per sample, in order; after a timeout it is an error that names the setting."""

        async def test() -> None:
            runtime = await stand.start(
                stand.role("generator", "generator"),
                stand.role("reward", "reward"),
                stand.role("slow", "reward", timeout_s=SHORT_S, seconds_per_call=60.0),
            )
            samples = runtime.data.get(samples_of(await generated(runtime, NAMES)), {"token_ids"})
            results = await runtime.reward("reward").score(samples)
            shares = [float((s.completion_ids == 1).mean()) for s in samples]
            assert [result.value for result in results] == shares
            [late] = await runtime.reward("slow").score(samples[:1])
            assert late.value is None
            assert "roles.slow.timeout_s" in str(late.error)

        self.run(stand, test)

    def test_a_worker_with_a_blocked_event_loop_says_where(self, stand: Stand) -> None:
        """The error of a call that exceeds its timeout shows where the worker hangs, also if nothing runs on its event
        loop: it is asked on a thread of its own.
        """
        self.require_processes("an event loop that a role blocks")

        async def test() -> None:
            blocked = stand.role("slow", "reward", timeout_s=SHORT_S, seconds_per_call=12.0, blocks=True)
            runtime = await stand.start(stand.role("generator", "generator"), blocked)
            samples = runtime.data.get(samples_of(await generated(runtime, NAMES[:1])), {"token_ids"})
            [late] = await runtime.reward("slow").score(samples)
            for part in ("roles.slow.timeout_s", "time.sleep"):
                assert part in str(late.error), f"{part!r} is not in: {late.error}"

        self.run(stand, test)

    def test_pause_keeps_and_abort_returns_what_was_sampled(self, stand: Stand) -> None:
        """Paused requests continue after ``resume``; aborted ones return the tokens sampled so far."""

        async def test() -> None:
            runtime = await stand.start(stand.role("generator", "generator", replicas=2, seconds_per_token=SLOW_S))
            fleet = runtime.generator("generator")
            expected = tokens(runtime, await generated(runtime, NAMES))
            waiting = asyncio.gather(*(fleet.generate(request(name)) for name in NAMES))
            await asyncio.sleep(4 * SLOW_S)
            await fleet.pause()
            await asyncio.sleep(4 * SLOW_S)
            await fleet.resume()
            assert tokens(runtime, await waiting) == expected
            waiting = asyncio.gather(*(fleet.generate(request(name)) for name in NAMES))
            await asyncio.sleep(4 * SLOW_S)
            await fleet.abort(NAMES[:3])
            ended = await waiting
            assert [c.finish_reason for c in ended] == ["abort"] * 3 + ["length"] * 3
            for short, whole in zip(tokens(runtime, ended), expected, strict=True):
                assert short == whole[: len(short)]

        self.run(stand, test)

    def test_parts_are_moved_out_and_back(self, stand: Stand) -> None:
        """Offload and onload report one event per worker and part with its live bytes, and leave values unchanged."""

        async def test() -> None:
            runtime = await stand.start(
                stand.role("trainer", "trainer"), stand.role("generator", "generator", replicas=2)
            )
            trainer, fleet = runtime.trainer("trainer"), runtime.generator("generator")
            before = await logprobs(runtime, prepared(LENGTHS)), tokens(runtime, await generated(runtime, NAMES))
            for group, worker_count in ((trainer, 1), (fleet, 2)):
                away = await group.offload({"weights"})
                assert [(e.worker, e.action, e.part, e.live_bytes) for e in away] == [
                    (worker, "offload", "weights", 0) for worker in range(worker_count)
                ]
            with pytest.raises(BackendError, match="weights"):
                await trainer.compute(prepared(LENGTHS), LOGPROBS)
            for group in (trainer, fleet):
                assert all(e.live_bytes > 0 for e in await group.onload({"weights"}))
            after = await logprobs(runtime, prepared(LENGTHS)), tokens(runtime, await generated(runtime, NAMES))
            assert after[0].tolist() == before[0].tolist()
            assert after[1] == before[1]

        self.run(stand, test)

    def test_a_role_that_does_not_start_closes_the_others(self, stand: Stand) -> None:
        """``start`` raises the error of the failed role and leaves no process, shared memory or port behind."""

        async def test() -> None:
            with Leftovers():
                broken = stand.role("trainer", "trainer", model=stand.run_dir / "no-model")
                with pytest.raises(ChatLearnError, match="no-model"):
                    await stand.start(stand.role("generator", "generator"), broken)
                await stand.close()

        self.run(stand, test)

    def test_roles_are_told_when_they_are_up(self, stand: Stand) -> None:
        """``start`` awaits ``role_is_up`` once for every trainer and generator role, when it can be called. One that
        shares a device with another starts after it, so that the first can be offloaded before.
        """
        told: list[str] = []

        async def test() -> None:
            runtime = stand.build(stand.plan(*(stand.role(name, kind) for name, kind in ROLES.items())))
            groups = {"trainer": runtime.trainer, "generator": runtime.generator}

            async def is_up(role: str) -> None:
                told.append(role)
                assert await groups[role](role).offload({"weights"}), f"{role!r} is told to be up, and moves nothing"
                devices = runtime.devices()
                for other in groups.keys() - set(told):
                    if devices[role] & devices[other]:
                        with pytest.raises((LookupError, ChatLearnError)):
                            await groups[other](other).offload({"weights"})

            await runtime.start(is_up)
            assert sorted(told) == sorted(groups)

        self.run(stand, test)

    def test_close_twice_leaves_nothing(self, stand: Stand) -> None:
        """``close`` is idempotent and leaves no process, shared memory or port, even after a worker was killed."""

        async def test() -> None:
            with Leftovers():
                runtime = await stand.start(
                    stand.role("trainer", "trainer", ranks=2 if self.hosts_processes() else 1),
                    stand.role("generator", "generator", replicas=2),
                    stand.role("reward", "reward"),
                )
                await runtime.reward("reward").score(samples_of(await generated(runtime, NAMES)))
                await kill_replica(runtime, "generator", 1)
                await runtime.close()
                await runtime.close()

        self.run(stand, test)


async def three_steps(runtime: Any, exported: Path) -> list[dict[str, Any]]:
    """Run three training steps; returns one dict of plain values per step, and one with the exported weights."""
    trainer, found = runtime.trainer("trainer"), []
    for step in range(3):
        completions = await generated(runtime, [f"{name}-{step}" for name in NAMES])
        plain = runtime.data.get_completions(completions)
        samples = samples_of(completions)
        rewards = await runtime.reward("reward").score(samples)
        derived = await trainer.derive(pack_samples(samples), doubled)
        computed = await logprobs(runtime, pack_samples(samples))
        metrics = await trainer.update(prepared(LENGTHS, step), LOSS)
        receipts = await runtime.sync_weights("trainer", "generator", step + 1)
        found.append(
            {
                "token_ids": tokens(runtime, completions),
                "generator_logprobs": [c.logprobs.tobytes() for c in plain],
                "text": [c.text for c in plain],
                "rewards": [(result.value, result.components) for result in rewards],
                "derived": runtime.data.get_tensors(derived.token_data)["doubled"].tolist(),
                "derived_metrics": {name: metric.value for name, metric in derived.metrics.items()},
                "trainer_logprobs": computed.tobytes(),
                "metrics": [metrics[name].value for name in ("loss", "grad_norm", "policy/logprob")],
                "receipts": [(receipt.replica, receipt.state, receipt.policy_version) for receipt in receipts],
            }
        )
    await trainer.export_model(exported)
    tensors = read_bigram_tensors(exported)
    found.append({"weights": [tensors[name].numpy().tobytes() for name in (TRANSITION, UNIGRAM)]})
    return found


async def logprobs(runtime: Any, batch: TrainBatch) -> Any:
    """Return the trainer's [T] float32 logprobs of a batch."""
    outputs = await runtime.trainer("trainer").compute(batch, LOGPROBS)
    return runtime.data.get_tensors(outputs)["logprobs"].float().numpy()


def greedy_tokens(model: Path) -> list[int]:
    """Compute the greedy completion of ``request("greedy")`` from the weights in a model directory."""
    tensors, asked = read_bigram_tensors(model), request("greedy")
    found = [int(asked.prompt_ids[-1])]
    for _ in range(asked.sampling.max_tokens):
        found.append(int((tensors[TRANSITION][found[-1]] + tensors[UNIGRAM]).argmax()))
    return found[1:]
