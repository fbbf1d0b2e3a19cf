"""The contract of a transport: every tensor arrives bit for bit under its name, or both ends raise."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, WeightSyncError
from chatlearn_core.plugins.records import Kind
from chatlearn_core.protocols import WeightReceiver, WeightSender
from chatlearn_core.types import SyncOffer, WeightShard
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.leftovers import shared_memory, unheld, wait_until_empty
from chatlearn_testing.loop_watch import blocks_of, least
from chatlearn_testing.stress import seeds
from chatlearn_testing.suites.conformance_suite import ConformanceSuite
from chatlearn_testing.suites.weight_sync_fixtures import (
    KeepingLoader,
    StreamingTrainer,
    Transport,
    WeightSyncFixtures,
    assert_loaded,
    make_special_tensors,
    make_tensors,
    offers_of,
)
from chatlearn_testing.suites.weight_sync_promises import WeightSyncPromisesContract

FILES_S = 2.0
"""Timeout of a plan without receivers; a transport that writes files waits for none, seconds."""
SHORT_S = 0.3
"""Timeout of a plan whose other end never answers, seconds."""
SLOW_S = 2.0
"""Time that a slow trainer takes for one tensor, seconds."""
LOAD_METHODS = {
    "tensors": "load_tensors",
    "boxes": "load_boxes",
    "checkpoint": "load_checkpoint",
    "memory_handles": "load_handles",
    "process_group": "load_broadcast",
}


class WeightSyncConformance(WeightSyncPromisesContract, WeightSyncFixtures, ConformanceSuite):
    """Contract tests that every transport must pass. A subclass sets ``backend``."""

    kind: ClassVar[Kind] = "weight_sync"

    def test_has_both_ends(self, transport: Transport) -> None:
        """The ends have every method of ``WeightSender`` and ``WeightReceiver``."""
        [sender], [receiver] = transport.ends(transport.plan(make_tensors()))
        assert isinstance(sender, WeightSender), "a method of WeightSender is missing"
        assert isinstance(receiver, WeightReceiver), "a method of WeightReceiver is missing"

    def test_every_tensor_arrives_bit_for_bit(self, transport: Transport) -> None:
        """Tensors of all dtypes and shapes arrive under their names, through the declared channel only.

        Only the receiver's caller calls ``begin``, ``finish`` and ``fail``; a receiver that does so makes the generator
        serve weights before they are confirmed.
        """
        tensors = make_tensors()
        outcome = self.run(transport.run(transport.plan(tensors), [StreamingTrainer(tensors)]))
        assert not outcome.errors, outcome.errors
        [loader] = outcome.loaders
        assert_loaded(loader, tensors)
        expected = {LOAD_METHODS[str(self.channel_under_test())]}
        assert loader.called == expected, f"the receiver called {sorted(loader.called)}, not only {expected}"
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        assert min(*outcome.senders, *outcome.receivers) >= num_bytes, (
            "an end reports fewer bytes than the tensors have"
        )

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_special_values_arrive_bit_for_bit(self, transport: Transport, ranks: int) -> None:
        """NaN with its payload, infinity, -0.0, subnormal numbers, wide integers, doubles, masks, empty, strided and
        expanded tensors arrive as they are.

        Changed: a conversion through another dtype, a comparison of numbers instead of bits, or a clean-up of values
        that are not finite, which would hide a policy that diverged.
        """
        tensors = make_special_tensors()
        trainers = [StreamingTrainer(tensors, rank, ranks) for rank in range(ranks)]
        outcome = self.run(transport.run(transport.plan(tensors, ranks=ranks), trainers))
        assert not outcome.errors, outcome.errors
        assert_loaded(outcome.loaders[0], tensors)

    def test_a_slow_trainer_does_not_block_the_event_loop(self, transport: Transport) -> None:
        """``receive`` waits without blocking: other coroutines of the process, which serve requests, go on."""
        tensors = make_tensors()

        def slowly(name: str) -> None:
            if name == "layers.1.proj.weight":
                time.sleep(SLOW_S)

        async def sync() -> None:
            trainer = StreamingTrainer(tensors, before=slowly)
            outcome = await asyncio.wait_for(transport.run(transport.plan(tensors), [trainer]), self.patience_s)
            assert not outcome.errors, outcome.errors

        blocked_s = least(lambda: blocks_of(sync()).longest_s, SLOW_S / 3)
        assert blocked_s < SLOW_S / 3, (
            f"the event loop stood still for {blocked_s:.1f} s while the trainer took {SLOW_S:g} s for a tensor"
        )

    def test_a_failed_sync_leaves_nothing_for_the_next(self, transport: Transport) -> None:
        """After a sync in which the trainer failed midway, the same two ends move other weights completely."""
        first, second = make_tensors(), make_tensors(1)
        ends = transport.ends(transport.plan(first))
        plan = transport.plan(first, timeout_s=self.patience_s / 4)
        broken = StreamingTrainer(first, before=_fail_at("layers.1.proj.weight"))
        assert self.run(transport.run(plan, [broken], ends=ends)).errors
        outcome = self.run(transport.run(transport.plan(second), [StreamingTrainer(second)], ends=ends))
        assert not outcome.errors, outcome.errors
        assert_loaded(outcome.loaders[0], second)

    def test_an_open_sync_is_cleaned_up_by_close(self, transport: Transport) -> None:
        """``close`` removes the shared memory and the files of a sync that was offered and never released."""
        memory = shared_memory()
        tensors = make_tensors()
        [sender], _ = transport.ends(transport.plan(tensors))
        plan = transport.plan(tensors, timeout_s=SHORT_S)

        async def send() -> None:
            sender.offer(plan)
            sending = asyncio.to_thread(sender.send, plan, StreamingTrainer(tensors))  # type: ignore[arg-type]  # a trainer in what senders use of it
            await asyncio.gather(sending, return_exceptions=True)

        self.run(send())
        transport.close()
        left = wait_until_empty(lambda: sorted(unheld(shared_memory() - memory, besides=os.getpid())))
        assert not left, f"shared memory was left behind: {left}"
        if not self.record().replayable:
            assert not (files := _files(transport.workspace)), f"files were left behind: {sorted(files)}"

    @pytest.mark.parametrize(("ranks", "replicas"), [(1, 2), (2, 1), (2, 2)])
    def test_several_ranks_and_replicas(self, transport: Transport, ranks: int, replicas: int) -> None:
        """Every rank sends the tensors or boxes that it owns, and every replica gets all tensors, although the last
        rank is slower than the others.
        """
        tensors = make_tensors()
        trainers = [
            StreamingTrainer(tensors, rank, ranks, before=_pause_at("layers.1.proj.weight", 0.3 * rank))
            for rank in range(ranks)
        ]
        outcome = self.run(transport.run(transport.plan(tensors, ranks=ranks, replicas=replicas), trainers))
        assert not outcome.errors, outcome.errors
        assert len(outcome.loaders) == replicas
        for loader in outcome.loaders:
            assert_loaded(loader, tensors)

    def test_several_syncs_in_a_row(self, transport: Transport) -> None:
        """The same two ends move new weights in every sync, and the number of files they keep does not grow."""
        ends = transport.ends(transport.plan(make_tensors()))
        left: list[int] = []
        for seed in seeds(4):
            tensors = make_tensors(seed)
            outcome = self.run(transport.run(transport.plan(tensors), [StreamingTrainer(tensors)], ends=ends))
            assert not outcome.errors, outcome.errors
            assert_loaded(outcome.loaders[0], tensors)
            left.append(len(_files(transport.workspace)))
        assert left[-1] <= left[1], f"files left in the workspace after each sync: {left}"

    def test_nothing_is_left_behind(self, transport: Transport) -> None:
        """``release`` and ``close`` leave no shared memory, no thread, and no file unless a replay needs it."""
        memory, threads = shared_memory(), threading.active_count()
        tensors = make_tensors()
        outcome = self.run(transport.run(transport.plan(tensors), [StreamingTrainer(tensors)]))
        assert not outcome.errors, outcome.errors
        transport.close()
        # All processes share /dev/shm: ignore memory that another process holds.
        left = wait_until_empty(lambda: sorted(unheld(shared_memory() - memory, besides=os.getpid())))
        assert not left, f"shared memory was left behind: {left}"
        assert threading.active_count() <= threads, f"threads were left behind: {threading.enumerate()}"
        if not self.record().replayable:
            assert not (files := _files(transport.workspace)), f"files were left behind: {sorted(files)}"

    @pytest.mark.parametrize("fault", ["unknown name", "wrong shape", "wrong dtype", "missing", "renamed"])
    def test_a_stream_that_breaks_its_manifest_is_refused(self, transport: Transport, fault: str) -> None:
        """A streamed tensor that differs from the manifest raises at both ends; an error names the tensor."""
        tensors = make_tensors()
        plan, sent, name = transport.plan(tensors), dict(tensors), "layers.1.proj.weight"
        if fault == "unknown name":
            name = "no.such.weight"
            sent[name] = torch.zeros(3)
        elif fault == "wrong shape":
            sent[name] = torch.zeros(3, 3)
        elif fault == "wrong dtype":
            sent[name] = sent[name].double()
        elif fault == "missing":
            del sent[name]
        else:
            sent["layers.9.proj.weight"] = sent.pop(name)
        outcome = self.run(transport.run(plan, [StreamingTrainer(sent)]))
        assert any(isinstance(error, WeightSyncError) for error in outcome.errors), f"no error, only {outcome}"
        assert any(name in str(error) or "layers.9" in str(error) for error in outcome.errors), outcome.errors
        assert all(isinstance(end, BackendError) for end in outcome.receivers), "a receiver accepted a broken stream"

    @pytest.mark.parametrize("fault", ["missing tail", "shifted box"])
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_boxes_that_leave_a_gap_are_refused(self, transport: Transport, fault: str, ranks: int) -> None:
        """If no rank streams the last rows of a tensor, or a box has a position one row too far, both ends raise; a
        ``WeightSyncError`` names the tensor.

        Accepted as complete: the transport counts bytes or names instead of elements.
        """
        if fault == "shifted box" and self.export_under_test() != "boxes":
            not_applicable("the export under test is 'full_tensors'")
        tensors, broken = make_tensors(), "layers.1.proj.weight"

        def change(shard: WeightShard) -> WeightShard:
            rows, *rest = shard.box or ((0, 0),)
            if shard.name != broken or (rows[1] != shard.global_shape[0] and fault == "missing tail"):
                return shard
            if fault == "missing tail":
                return replace(shard, box=((rows[0], rows[1] - 1), *rest), tensor=shard.tensor[:-1])
            return replace(shard, box=((rows[0] + 1, rows[1] + 1), *rest))

        trainers = [StreamingTrainer(tensors, rank, ranks, change=change) for rank in range(ranks)]
        # The timeout bounds a rank that waits for the other.
        plan = transport.plan(tensors, ranks=ranks, timeout_s=self.patience_s / 20)
        outcome = self.run(transport.run(plan, trainers))
        assert any(isinstance(error, WeightSyncError) and broken in str(error) for error in outcome.errors), (
            f"no error names {broken}: {outcome.errors}"
        )
        assert all(isinstance(end, BackendError) for end in outcome.receivers), (
            "a receiver accepted an incomplete tensor"
        )

    def test_each_sync_has_a_manifest_of_its_own(self, transport: Transport) -> None:
        """The same two ends can move other names, shapes and dtypes in the next sync: checks and buffer layouts follow
        the manifest of the current sync.
        """
        first = make_tensors()
        other = {name.replace("layers", "blocks"): tensor.double() for name, tensor in make_tensors(1).items()}
        other["embed.weight"] = make_tensors(2)["embed.weight"][:40]
        ends = transport.ends(transport.plan(first))
        for tensors in (first, other, first):
            outcome = self.run(transport.run(transport.plan(tensors), [StreamingTrainer(tensors)], ends=ends))
            assert not outcome.errors, outcome.errors
            assert_loaded(outcome.loaders[0], tensors)

    def test_a_failing_sender_reaches_the_receivers(self, transport: Transport) -> None:
        """If the trainer raises, ``send`` raises its error, and every ``receive`` raises at once with its text."""
        tensors = make_tensors()
        plan = transport.plan(tensors, replicas=2, timeout_s=self.patience_s / 2)
        outcome = self.run(transport.run(plan, [StreamingTrainer(tensors, before=_fail_at("layers.1.proj.weight"))]))
        assert "broken on purpose" in str(outcome.senders[0]), "send swallowed the trainer's error"
        for end in outcome.receivers:
            assert isinstance(end, BackendError), f"the receiver returned {end!r}"
            assert not isinstance(end, BackendTimeoutError), "the receiver noticed only by its timeout"
            assert "broken on purpose" in str(end), f"the receiver's error lacks the sender's: {end}"

    def test_a_failing_loader_fails_its_replica_only(self, transport: Transport) -> None:
        """``receive`` raises the loader's error, the other replica gets all tensors, and no call hangs."""
        tensors = make_tensors()
        loaders = [KeepingLoader(before=_fail_at("layers.1.proj.weight")), KeepingLoader()]
        plan = transport.plan(tensors, replicas=2)
        outcome = self.run(transport.run(plan, [StreamingTrainer(tensors)], loaders))
        assert "broken on purpose" in str(outcome.receivers[0]), (
            f"receive swallowed the loader's error: {outcome.receivers[0]!r}"
        )
        assert not isinstance(outcome.receivers[1], BaseException), outcome.receivers[1]
        assert_loaded(outcome.loaders[1], tensors)

    def test_a_silent_sender_is_a_timeout_that_names_it(self, transport: Transport) -> None:
        """A receiver without data for ``plan.timeout_s`` raises a ``BackendTimeoutError`` that names sender ranks."""
        plan = transport.plan(make_tensors(), timeout_s=SHORT_S)
        [sender], [receiver] = transport.ends(plan)
        offers = offers_of([sender], plan)
        with pytest.raises(BackendTimeoutError) as caught:
            self.run(receiver.receive(plan, offers, KeepingLoader()))
        sender.release(plan)
        assert re.search(r"rank\D*0", str(caught.value)), f"does not name the silent sender: {caught.value}"

    def test_a_silent_receiver_does_not_hold_the_sender(self, transport: Transport) -> None:
        """``send`` either completes without a receiver, or raises a ``BackendTimeoutError`` that names it."""
        tensors = make_tensors()
        plan = transport.plan(tensors, timeout_s=SHORT_S)
        [sender], _ = transport.ends(plan)
        offers_of([sender], plan)

        async def send() -> list[int | BaseException]:
            sending = asyncio.to_thread(sender.send, plan, StreamingTrainer(tensors))  # type: ignore[arg-type]  # a trainer in what senders use of it
            return list(await asyncio.gather(sending, return_exceptions=True))

        [end] = self.run(send())
        sender.release(plan)
        assert isinstance(end, int | BackendTimeoutError), f"send ended with {end!r}"
        assert isinstance(end, int) or "generator" in str(end), f"does not name the silent receiver: {end}"

    def test_corrupted_files_are_refused(self, transport: Transport) -> None:
        """A changed byte in a file raises a ``WeightSyncError``; it must not yield a slightly different policy."""
        if self.record().reach == "process":
            not_applicable("the record declares the reach 'process': no byte leaves it")
        tensors = make_tensors()
        plan = transport.plan(tensors, timeout_s=FILES_S)
        [sender], [receiver] = transport.ends(plan)

        async def corrupt() -> bool:
            offers = offers_of([sender], plan)
            sending = asyncio.create_task(asyncio.to_thread(sender.send, plan, StreamingTrainer(tensors)))  # type: ignore[arg-type]  # a trainer in what senders use of it
            # A transport without files gives up after the plan's timeout, because no receiver takes anything.
            await asyncio.wait([sending])
            files = sorted(_files(transport.workspace), key=lambda file: file.stat().st_size)
            if sending.exception() is not None or not files:
                sender.release(plan)
                return False
            content = bytearray(files[-1].read_bytes())
            content[-len(content) // 4] ^= 0x10
            files[-1].write_bytes(content)
            with pytest.raises(WeightSyncError):
                await receiver.receive(plan, offers, KeepingLoader())
            sender.release(plan)
            return True

        if not self.run(corrupt()):
            not_applicable("this transport keeps no bytes in files")

    def test_a_foreign_offer_is_refused(self, transport: Transport) -> None:
        """A receiver raises a ``WeightSyncError`` at once for an offer of another transport."""
        plan = transport.plan(make_tensors())
        [sender], [receiver] = transport.ends(plan)
        sender.offer(plan)
        with pytest.raises(WeightSyncError):
            self.run(receiver.receive(plan, [SyncOffer(0, {"of": "another transport"})], KeepingLoader()))
        sender.release(plan)

    def test_reach_is_what_the_record_says(self, transport: Transport) -> None:
        """A transport with the reach ``process`` refuses a receiver in another process already in ``offer``."""
        if self.record().reach != "process":
            not_applicable(f"the record declares the reach {self.record().reach!r}")
        plan = transport.plan(make_tensors())
        [here] = plan.receivers
        plan = replace(plan, receivers=(replace(here, process=here.process + 1),))
        with pytest.raises(WeightSyncError):
            transport.sender(plan.senders[0]).offer(plan)

    def test_a_replica_that_missed_a_sync_takes_it_later(self, transport: Transport) -> None:
        """``replayable``: after the sync, a new receiver gets the same version without offers or the trainer."""
        if not self.record().replayable:
            not_applicable("the record does not declare 'replayable'")
        tensors = make_tensors()
        plan = transport.plan(tensors)
        assert not self.run(transport.run(plan, [StreamingTrainer(tensors)])).errors
        late = KeepingLoader()
        self.run(transport.receiver(plan.receivers[0]).receive(plan, [], late))
        assert_loaded(late, tensors)

    def test_release_without_send_is_fine(self, transport: Transport) -> None:
        """``release`` without ``send`` and a second ``release`` are allowed; the next sync works."""
        tensors = make_tensors()
        ends = transport.ends(transport.plan(tensors))
        plan = transport.plan(tensors)
        offers_of(ends[0], plan)
        ends[0][0].release(plan)
        ends[0][0].release(plan)
        outcome = self.run(transport.run(transport.plan(tensors), [StreamingTrainer(tensors)], ends=ends))
        assert not outcome.errors, outcome.errors


def _files(directory: Path) -> set[Path]:
    return {path for path in directory.rglob("*") if path.is_file()} if directory.is_dir() else set()


def _pause_at(name: str, seconds: float) -> Callable[[str], None]:
    def before(current: str) -> None:
        if current == name:
            time.sleep(seconds)

    return before


def _fail_at(name: str) -> Callable[[str], None]:
    def before(current: str) -> None:
        if current == name:
            raise RuntimeError(f"broken on purpose at {name}")

    return before
