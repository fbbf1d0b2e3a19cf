"""The contract of a trainer's promises: several ranks, engine arguments, a process and batches left as they were."""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.plugins.import_string import resolve_import_string
from chatlearn_core.protocols import ModelSource, RoleContext, Trainer
from chatlearn_core.types import OutputRequest, TrainBatch
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.batches import MaskedPolicyLoss
from chatlearn_testing.other_process import START_S
from chatlearn_testing.process_state import StateWatch
from chatlearn_testing.processes import descendants
from chatlearn_testing.suites.conformance_suite import ConformanceSuite
from chatlearn_testing.suites.trainer_fixtures import LEARNING_RATE, MakeTrainer, TrainerFixtures, stream

RANKS = 2
SEEDS = (11, 12)


class TrainerPromisesContract(TrainerFixtures, ConformanceSuite):
    """The part of ``TrainerConformance`` about promises."""

    def test_unknown_engine_arguments_are_refused(self, model_directory: Path) -> None:
        """An engine argument that the engine does not have raises a ``ConfigError`` that names it, in the constructor
        or in ``setup``; one that is ignored is a typing error that nobody notices.
        """
        with pytest.raises(ConfigError) as caught:
            self._set_up_and_close(model_directory, {"no_such_argument": 1})
        assert "no_such_argument" in str(caught.value), f"does not name the argument: {caught.value}"

    def test_what_is_declared_is_there(self, make_trainer: MakeTrainer) -> None:
        """Options that the record names exist, and a trainer of one rank declares neither ``parallel`` nor
        ``reshards``; every declared payload has a manifest and a stream.
        """
        record, fields = self.record(), self.options_model().model_fields
        named = {*record.parallel.values(), *record.layout_options}
        assert named <= fields.keys(), f"the record names options that do not exist: {sorted(named - fields.keys())}"
        if record.max_ranks == 1:
            assert not record.parallel, f"declares max_ranks=1 and the dimensions {sorted(record.parallel)}"
            assert not record.reshards, "declares max_ranks=1 and reshards: there is no other number of ranks"
        adapted: dict[str, Any] = {"lora": {}} if "lora" in fields else {}  # adapters may be a setting
        if "adapter" not in getattr(self.make_options(**adapted), "payloads", record.payloads):
            return
        trainer = make_trainer(**adapted)
        manifest = trainer.manifest("adapter")
        assert manifest is not None, "rank 0 returns the manifest of the adapters"
        streamed = {shard.name: tuple(shard.global_shape) for shard in trainer.weights(payload="adapter")}
        assert streamed == {name: spec.shape for name, spec in manifest.tensors.items()}, (
            "the stream of the adapters is not what their manifest says"
        )
        assert streamed.keys().isdisjoint(_whole_names(trainer)), "the payload 'adapter' is the whole model"

    @pytest.mark.thorough
    def test_declared_ranks_work(
        self, make_trainer: MakeTrainer, model_directory: Path, batch: TrainBatch, tmp_path: Path
    ) -> None:
        """In each of ``rank_layouts`` two ranks have ranks and sizes of their own or are parts of one model, stream the
        same model as one rank, and make the same step; with ``reshards``, they load the checkpoint of one rank.
        """
        record = self.record()
        if record.max_ranks == 1:
            not_applicable("the record declares max_ranks=1")
        if self.device != "cpu":
            not_applicable("the suite starts several ranks on CPUs only")
        alone, loss = make_trainer(), MaskedPolicyLoss()
        checkpoint = tmp_path / "checkpoint" if record.reshards else None
        if checkpoint is not None:
            alone.update(loss.prepare(batch), loss)
            alone.save(checkpoint)
        alone.update(loss.prepare(batch), loss)
        expected = stream(alone)
        torch.save(batch, tmp_path / "batch.pt")
        for layout in self.rank_layouts:
            options = self.make_options(**({"learning_rate": LEARNING_RATE, "param_dtype": "float32"} | dict(layout)))
            work = (record.factory, options, f"tcp://127.0.0.1:{_free_port()}", model_directory, tmp_path, checkpoint)
            ranks = [_Rank(index, *work) for index in range(RANKS)]
            try:
                found = [rank.result(max(self.patience_s, START_S)) for rank in ranks]
            finally:
                for rank in ranks:
                    rank.end()
            self._check_ranks(layout, found, expected)

    def _check_ranks(
        self, layout: Mapping[str, Any], found: Sequence[Mapping[str, Any]], expected: Mapping[str, Tensor]
    ) -> None:
        what = f"{RANKS} ranks" + (f" with {dict(layout)}" if layout else "")
        errors = [str(one["error"]) for one in found if "error" in one]
        assert not errors, f"{what} do not work: {errors}"
        places = [(one["rank"], one["size"]) for one in found]
        assert places in ([(0, RANKS), (1, RANKS)], [(0, 1), (0, 1)]), (
            f"data-parallel ranks and sizes of {what} are {places}"
        )
        if places == [(0, 1), (0, 1)]:
            assert self.record().parallel, (
                f"{what} each say that they are the only one, and no dimension divides the model"
            )
        streamed: dict[str, Any] = {}
        for one in found:
            streamed |= one["weights"]
        assert streamed.keys() == expected.keys(), f"{what} stream other tensors than one"
        for name, values in streamed.items():
            apart = float((torch.from_numpy(values).double() - expected[name].double()).abs().max())
            assert apart <= LEARNING_RATE / 2, f"{name}: after the same step, {what} and one differ by {apart}"

    def test_the_work_of_a_trainer_leaves_the_process_as_it_was(
        self, make_trainer: MakeTrainer, batch: TrainBatch, tmp_path: Path
    ) -> None:
        """Computing, updating, saving and loading seed no random state: the run owns them. Drawing from torch's, as
        dropout does, is allowed.
        """
        trainer, loss = make_trainer(), MaskedPolicyLoss()
        prepared, request = loss.prepare(batch), OutputRequest(frozenset({"logprobs"}))
        own = random.getstate(), np.random.get_state(), torch.get_rng_state()

        def save_and_load() -> None:
            trainer.save(tmp_path / "checkpoint")
            trainer.load(tmp_path / "checkpoint")

        works: Mapping[str, Callable[[], object]] = {
            "compute": lambda: trainer.compute(batch, request),
            "update": lambda: trainer.update(prepared, loss),
            "weights": lambda: stream(trainer),
            "save and load": save_and_load,
        }
        try:
            for name, work in works.items():
                after: list[tuple[Any, ...]] = []
                for seed in SEEDS:
                    random.seed(seed)
                    np.random.seed(seed)  # the global state is what is watched
                    torch.manual_seed(seed)
                    before = random.getstate(), str(np.random.get_state())
                    work()
                    assert (random.getstate(), str(np.random.get_state())) == before, (
                        f"{name} changes the global random state of Python or numpy"
                    )
                    after.append(tuple(torch.get_rng_state().tolist()))
                assert len(set(after)) == len(SEEDS), f"{name} seeds torch: other seeds before give equal states after"
        finally:
            random.setstate(own[0])
            np.random.set_state(own[1])
            torch.set_rng_state(own[2])

    def test_a_batch_is_read_only(self, make_trainer: MakeTrainer, batch: TrainBatch) -> None:
        """``compute`` and ``update`` change no tensor of the batch: the run reads it again for the next role."""
        trainer, loss = make_trainer(), MaskedPolicyLoss()
        for what, given in {"compute": batch.select(range(batch.num_sequences)), "update": loss.prepare(batch)}.items():
            before = _tensors_of(given)
            copies = {name: tensor.clone() for name, tensor in before.items()}
            if what == "compute":
                trainer.compute(given, OutputRequest(frozenset({"logprobs"})))
            else:
                trainer.update(given, loss)
            after = _tensors_of(given)
            assert after.keys() == copies.keys(), f"{what} adds or removes {sorted(after.keys() ^ copies.keys())}"
            changed = [name for name, tensor in copies.items() if not torch.equal(after[name], tensor)]
            assert not changed, f"{what} changes {', '.join(changed)} of the batch"

    def test_closing_a_trainer_leaves_nothing(
        self, model_directory: Path, batch: TrainBatch, make_trainer: MakeTrainer
    ) -> None:
        """``close`` ends every thread and process that the trainer started, before or after it worked."""
        make_trainer()  # what only a first trainer does
        watch, children = StateWatch(ignored=self.ignored_state()), set(descendants(os.getpid()))
        for works in (False, True):
            trainer, loss = make_trainer(), MaskedPolicyLoss()
            if works:
                trainer.update(loss.prepare(batch), loss)
            trainer.close()
        assert not (left := watch.threads_left()), f"outlive close: {', '.join(left)}"
        assert not (changed := watch.changed_state()), f"changed: {'; '.join(changed)}"
        assert not (set(descendants(os.getpid())) - children), "processes outlive close"

    def _set_up_and_close(self, directory: Path, arguments: dict[str, Any]) -> None:
        source = ModelSource(str(directory), str(directory))
        context = RoleContext("trainer", source, device=self.device, trainable=True, engine_arguments=arguments)
        trainer: Trainer = self.build()(self.make_options(), context)
        try:
            trainer.setup()
        finally:
            trainer.close()


class _Rank:
    """A process that is one rank of several; a new one, because the threads of some engines do not survive a fork."""

    def __init__(self, index: int, *work: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_be_rank, args=(theirs, index, *work), daemon=True)
        self._process.start()
        theirs.close()

    def result(self, patience_s: float) -> dict[str, Any]:
        """Return what the rank tells in the end."""
        if not self._pipe.poll(patience_s):
            return {"error": f"no answer within {patience_s:g} s"}
        try:
            found: dict[str, Any] = self._pipe.recv()
        except EOFError:
            return {"error": f"the process of a rank ended with {self._process.exitcode}"}
        return found

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _be_rank(
    pipe: Connection,
    index: int,
    factory: str,
    options: Any,
    rendezvous: str,
    directory: Path,
    scratch: Path,
    checkpoint: Path | None,
) -> None:
    loss = MaskedPolicyLoss()
    try:
        batch: TrainBatch = torch.load(scratch / "batch.pt", weights_only=False)
        source = ModelSource(str(directory), str(directory))
        context = RoleContext(
            "trainer", source, rank=index, world_size=RANKS, device="cpu", trainable=True, rendezvous=rendezvous
        )
        trainer: Trainer = resolve_import_string(factory)(options, context)
        trainer.setup()
        rank, size = trainer.data_parallel_rank, trainer.data_parallel_size
        if checkpoint is not None:
            trainer.load(checkpoint)
        prepared = loss.prepare(batch)
        trainer.update(prepared.select(range(rank, prepared.num_sequences, size)), loss)
        # As arrays: tensors would be sent through shared memory.
        weights = {s.name: s.tensor.detach().float().numpy().copy() for s in trainer.weights()}
        pipe.send({"rank": rank, "size": size, "weights": weights})
        pipe.poll(None)  # the other rank may need this one until the end
    except BaseException as error:
        pipe.send({"error": f"{type(error).__name__}: {error}"})


def _whole_names(trainer: Trainer) -> set[str]:
    return {shard.name for shard in trainer.weights()}


def _tensors_of(batch: TrainBatch) -> dict[str, Tensor]:
    own = {name: getattr(batch, name) for name in ("token_ids", "cu_seqlens", "loss_mask", "unit_index", "group_index")}
    return {name: value for name, value in own.items() if isinstance(value, Tensor)} | {
        f"token_data[{name!r}]": value for name, value in batch.token_data.items()
    }


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
