"""The contract of a trainer on one rank: numbers equal to a plain forward's (invariants 3 and 5 of the design)."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from chatlearn_core.exceptions import BackendError
from chatlearn_core.plugins.records import Kind
from chatlearn_core.protocols import MeasuresMemory, MemoryPart, Trainer
from chatlearn_core.types import Metric, OutputRequest, Outputs, TrainBatch
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.batches import (
    MaskedPolicyLoss,
    make_batch,
    reference_entropy,
    reference_logprobs,
    reference_loss,
    sequences,
)
from chatlearn_testing.stress import first_seed
from chatlearn_testing.suites.conformance_suite import ConformanceSuite
from chatlearn_testing.suites.trainer_checkpoints import TrainerCheckpointsContract
from chatlearn_testing.suites.trainer_fixtures import (
    RELATIVE,
    MakeTrainer,
    TrainerFixtures,
    assert_close,
    logprobs_of,
    stream,
)
from chatlearn_testing.suites.trainer_promises import TrainerPromisesContract
from chatlearn_testing.suites.trainer_steps import TrainerStepsContract
from chatlearn_testing.suites.trainer_weights import TrainerWeightsContract

TRAINER_PARTS: tuple[MemoryPart, ...] = ("weights", "gradients", "optimizer")
CHANGE_TOLERANCE = 1e-2
"""Accepted relative difference of a tensor's change in one step, by norm. Adam normalises each element's gradient, so
elements whose gradient is rounding noise move by a full step in a random direction. Gradient norms are compared with
the stricter ``RELATIVE``.
"""


class TrainerConformance(
    TrainerStepsContract,
    TrainerCheckpointsContract,
    TrainerWeightsContract,
    TrainerPromisesContract,
    TrainerFixtures,
    ConformanceSuite,
):
    """Contract tests that every trainer must pass.

    A subclass sets ``backend``, a fixture ``model_directory`` and ``load_reference``. It also sets ``options`` if the
    backend's defaults do not learn within a step: the suite needs no warm-up and a learning rate that changes float32
    weights.
    """

    kind: ClassVar[Kind] = "trainer"

    def test_is_a_trainer(self, make_trainer: MakeTrainer) -> None:
        """The object has every method of ``Trainer``, is healthy after ``setup`` and reports rank 0 of 1."""
        trainer = make_trainer()
        assert isinstance(trainer, Trainer), "a method of chatlearn_core.protocols.Trainer is missing"
        assert trainer.health() is None, f"not healthy right after setup: {trainer.health()}"
        assert (trainer.data_parallel_rank, trainer.data_parallel_size) == (0, 1)

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_logprobs_equal_a_plain_forward(
        self, make_trainer: MakeTrainer, reference: torch.nn.Module, batch: TrainBatch, temperature: float
    ) -> None:
        """Entry t is the logprob of token t given the earlier tokens of its sequence, and 0 outside the loss mask.

        Off by one: labels are shifted twice or not at all. Wrong from the second sequence on: attention crosses the
        borders of packed sequences, or positions do not restart. Wrong only at 0.7: the temperature is ignored.
        """
        trainer = make_trainer()
        outputs = trainer.compute(batch, OutputRequest(frozenset({"logprobs"}), temperature))
        with torch.no_grad():
            alone = [reference_logprobs(reference, ids, temperature) for ids in sequences(batch, batch.token_ids)]
        assert_close(outputs["logprobs"], torch.cat(alone) * batch.loss_mask, "logprobs")

    def test_entropy_equals_a_plain_forward(
        self, make_trainer: MakeTrainer, reference: torch.nn.Module, batch: TrainBatch
    ) -> None:
        """Entry t is the entropy, nats, of the distribution of token t, and 0 outside the loss mask."""
        if "entropy" not in self.record().outputs:
            not_applicable("the record does not declare the output 'entropy'")
        outputs = make_trainer().compute(batch, OutputRequest(frozenset({"entropy"})))
        with torch.no_grad():
            alone = [reference_entropy(reference, ids) for ids in sequences(batch, batch.token_ids)]
        assert_close(outputs["entropy"], torch.cat(alone) * batch.loss_mask, "entropy")

    def test_outputs_do_not_depend_on_packing(self, make_trainer: MakeTrainer, batch: TrainBatch) -> None:
        """A sequence has equal outputs packed, in another order and alone, and outputs have the order of the batch."""
        for head in sorted(self.record().heads):
            trainer = make_trainer(head=head)
            request = _request(head, self.record().outputs)
            packed = trainer.compute(batch, request)
            reverse = list(range(batch.num_sequences))[::-1]
            reordered = trainer.compute(batch.select(reverse), request)
            for index in range(batch.num_sequences):
                alone = trainer.compute(batch.select([index]), request)
                for name, values in alone.items():
                    assert_close(_part(packed, name, batch, index), values, f"{head}: {name} of sequence {index}")
                    mirrored = _part(reordered, name, batch.select(reverse), reverse.index(index))
                    assert_close(mirrored, values, f"{head}: {name} of sequence {index}, order reversed")

    def test_outputs_do_not_depend_on_micro_batches(self, make_trainer: MakeTrainer, batch: TrainBatch) -> None:
        """Many small micro-batches give the same outputs as a single large one, in the order of the batch."""
        for head in sorted(self.record().heads):
            request = _request(head, self.record().outputs)
            large = make_trainer(head=head).compute(batch, request)
            small = make_trainer(head=head, **self.small_micro_batches()).compute(batch, request)
            assert large.keys() == small.keys() == set(request.names)
            for name, values in large.items():
                assert_close(small[name], values, f"{head}: {name}")

    def test_outputs_are_zero_outside_the_loss_mask(self, make_trainer: MakeTrainer, batch: TrainBatch) -> None:
        """Per-token outputs are [T] and 0 outside the loss mask, which excludes the first token of each sequence."""
        for head in sorted(self.record().heads):
            outputs = make_trainer(head=head).compute(batch, _request(head, self.record().outputs))
            for name in outputs.keys() & {"logprobs", "entropy", "values"}:
                assert outputs[name].shape == (batch.num_tokens,), f"{name} is not [T]"
                assert not outputs[name][~batch.loss_mask].any(), f"{name} is not 0 outside the loss mask"

    def test_an_empty_batch_is_legal(self, make_trainer: MakeTrainer, batch: TrainBatch) -> None:
        """An empty batch, as a rank with an empty slice gets, computes nothing and leaves the weights unchanged."""
        trainer, loss = make_trainer(), MaskedPolicyLoss()
        empty = loss.prepare(batch.select([]))
        before = stream(trainer)
        assert trainer.compute(empty, loss.needs)["logprobs"].shape == (0,)
        assert trainer.update(empty, loss)["loss"].value == 0.0
        after = stream(trainer)
        assert all(torch.equal(before[name], after[name]) for name in before), "an empty batch changed the weights"

    def test_update_reports_the_loss_and_gradient_norm_of_a_plain_forward(
        self, make_trainer: MakeTrainer, reference: torch.nn.Module, batch: TrainBatch
    ) -> None:
        """``loss`` is the sum over the mini-batch, and ``grad_norm`` the norm before clipping.

        Both off by a factor: the loss is scaled by the number of micro-batches, ranks or accumulation steps. Both wrong
        otherwise: the loss does not get the mask. Only the norm wrong: it is measured after clipping, or tied weights
        count twice.
        """
        loss = MaskedPolicyLoss()
        for name, options in (("one micro-batch", {}), ("many micro-batches", self.small_micro_batches())):
            metrics = make_trainer(**options).update(loss.prepare(batch), loss)
            reference.zero_grad(set_to_none=True)
            expected = reference_loss(reference, batch)
            expected.backward()  # type: ignore[no-untyped-call]  # torch
            gradients = [p.grad for p in reference.parameters() if p.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(gradients))
            assert metrics["loss"].value == pytest.approx(float(expected.detach()), rel=RELATIVE, abs=1e-6), name
            assert metrics["grad_norm"].value == pytest.approx(norm, rel=RELATIVE), name

    def test_update_does_not_depend_on_micro_batches(self, make_trainer: MakeTrainer, batch: TrainBatch) -> None:
        """Loss, gradient norm and parameter changes do not depend on micro-batch sizes or the order of sequences."""
        loss = MaskedPolicyLoss()
        large, small, reordered = make_trainer(), make_trainer(**self.small_micro_batches()), make_trainer()
        before = stream(large)
        metrics = large.update(loss.prepare(batch), loss)
        others = {
            "small micro-batches": (small, small.update(loss.prepare(batch), loss)),
            "reversed order": (
                reordered,
                reordered.update(loss.prepare(batch.select(range(batch.num_sequences)[::-1])), loss),
            ),
        }
        for what, (trainer, other) in others.items():
            for name in ("loss", "grad_norm", "policy/logprob"):
                assert other[name].value == pytest.approx(metrics[name].value, rel=RELATIVE, abs=1e-6), (what, name)
            expected, found = stream(large), stream(trainer)
            for name, start in before.items():
                change, other_change = (expected[name] - start).float(), (found[name] - start).float()
                distance = float((change - other_change).norm())
                assert distance <= CHANGE_TOLERANCE * float(change.norm()) + 1e-7, (
                    f"{what}: {name} moved by {float(other_change.norm())} instead of {float(change.norm())},"
                    f" {distance} apart"
                )

    def test_masked_tokens_teach_nothing(self, make_trainer: MakeTrainer, batch: TrainBatch) -> None:
        """Data outside the loss mask changes neither loss nor weights; if it does, the loss got a wrong mask."""
        loss = MaskedPolicyLoss()
        noise = torch.where(batch.loss_mask, batch.token_data["advantages"], torch.tensor(1e3))
        noisy = batch.select(range(batch.num_sequences))
        noisy.token_data["advantages"] = noise
        clean_trainer, noisy_trainer = make_trainer(), make_trainer()
        clean, other = clean_trainer.update(loss.prepare(batch), loss), noisy_trainer.update(loss.prepare(noisy), loss)
        assert other["loss"].value == clean["loss"].value, "masked tokens count in the loss: the loss mask was dropped"
        expected, found = stream(clean_trainer), stream(noisy_trainer)
        assert all(torch.equal(expected[name], found[name]) for name in expected), "masked tokens moved the weights"

    def test_updates_descend(self, make_trainer: MakeTrainer, batch: TrainBatch) -> None:
        """Steps on a batch lower its loss; if the loss rises, the gradient's sign or scale is wrong."""
        trainer, loss = make_trainer(), MaskedPolicyLoss()
        losses = [trainer.update(loss.prepare(batch), loss)["loss"].value for _ in range(4)]
        assert losses[-1] < losses[0], f"the loss went from {losses[0]} to {losses[-1]} in three steps"
        before = stream(make_trainer())
        after = stream(trainer)
        still = [name for name in before if torch.equal(before[name], after[name])]
        assert not still, f"three steps did not change {', '.join(still)}"

    def test_metrics_are_parts(self, make_trainer: MakeTrainer, batch: TrainBatch) -> None:
        """Metrics are sums with counts, which merge exactly over ranks and micro-batches; ``loss`` is a sum."""
        loss = MaskedPolicyLoss()
        metrics = make_trainer(**self.small_micro_batches()).update(loss.prepare(batch), loss)
        assert all(isinstance(metric, Metric) for metric in metrics.values()), metrics
        assert {"loss", "grad_norm", "lr"} <= metrics.keys(), f"only {sorted(metrics)}"
        assert metrics["loss"].reducer == "sum"
        assert metrics["policy/logprob"].count == float(batch.loss_mask.sum()), "metrics of micro-batches were lost"

    def test_a_loss_that_is_not_finite_is_refused(self, make_trainer: MakeTrainer, batch: TrainBatch) -> None:
        """A NaN loss raises a ``BackendError`` that names a sample, and leaves weights and optimizer unchanged.

        A trainer that applies the step would write NaN into every weight, and the run would fail only later.
        """
        loss, poisoned = MaskedPolicyLoss(), batch.select(range(batch.num_sequences))
        poisoned.token_data["advantages"] = torch.full_like(batch.token_data["advantages"], torch.nan)
        trainer, other = make_trainer(), make_trainer()
        before = stream(trainer)
        with pytest.raises(BackendError) as caught:
            trainer.update(loss.prepare(poisoned), loss)
        assert any(name in str(caught.value) for name in batch.sample_ids), f"names no sample: {caught.value}"
        after = stream(trainer)
        assert all(torch.equal(before[name], after[name]) for name in before), "the refused step changed the weights"
        trainer.update(loss.prepare(batch), loss)
        other.update(loss.prepare(batch), loss)
        assert _same(trainer, other), "the refused step changed state that the next step uses"

    def test_a_reference_computes_without_learning(self, make_trainer: MakeTrainer, batch: TrainBatch) -> None:
        """With ``context.trainable`` False, outputs are unchanged and ``update`` raises a ``BackendError``."""
        frozen, loss = make_trainer(trainable=False), MaskedPolicyLoss()
        assert_close(logprobs_of(frozen, batch), logprobs_of(make_trainer(), batch), "logprobs")
        with pytest.raises(BackendError):
            frozen.update(loss.prepare(batch), loss)

    def test_offload_and_onload_change_nothing(self, make_trainer: MakeTrainer, batch: TrainBatch) -> None:
        """Offload and onload restore weights, gradients and optimizer bit for bit; unknown parts are ignored."""
        loss, moved, stayed = MaskedPolicyLoss(), make_trainer(), make_trainer()
        for trainer in (moved, stayed):
            trainer.update(loss.prepare(batch), loss)
        for _ in range(2):  # the second call must have no effect
            moved.offload({"weights", "gradients", "optimizer", "kv_cache"})
        for _ in range(2):
            moved.onload({"weights", "gradients", "optimizer", "kv_cache"})
        for trainer in (moved, stayed):
            trainer.update(loss.prepare(batch), loss)
        assert _same(moved, stayed), "the step after offload and onload differs"

    def test_offloaded_parts_occupy_nothing(self, make_trainer: MakeTrainer, batch: TrainBatch) -> None:
        """After an update and a compute, every offloaded part has 0 live bytes and the others keep theirs.

        If offloaded memory is not really free, another role on the same device runs out of memory.
        """
        loss, trainer = MaskedPolicyLoss(), make_trainer()
        if not isinstance(trainer, MeasuresMemory):
            not_applicable("the trainer has no live_bytes, so the suite cannot measure its memory")
        trainer.update(loss.prepare(batch), loss)
        logprobs_of(trainer, batch)
        before = {part: trainer.live_bytes(part) for part in TRAINER_PARTS}
        assert before["weights"] > 0, "the weights of a trainer that works occupy memory"
        assert before["optimizer"] > 0, "the optimizer of a trainer that learns occupies memory"
        trainer.offload({"optimizer", "gradients"})
        assert [trainer.live_bytes(part) for part in TRAINER_PARTS] == [before["weights"], 0, 0]
        trainer.offload({"weights"})
        assert [trainer.live_bytes(part) for part in TRAINER_PARTS] == [0, 0, 0]
        trainer.onload({"weights"})
        assert [trainer.live_bytes(part) for part in TRAINER_PARTS] == [before["weights"], 0, 0]
        trainer.onload({"gradients", "optimizer"})
        assert {part: trainer.live_bytes(part) for part in TRAINER_PARTS} == before

    def test_closing_twice_is_fine(self, make_trainer: MakeTrainer) -> None:
        """``close`` is idempotent, and a closed trainer is not healthy."""
        trainer = make_trainer()
        trainer.close()
        trainer.close()
        assert trainer.health() is not None, "healthy although closed"

    @pytest.fixture(scope="class")
    @classmethod
    def batch(cls, reference: torch.nn.Module) -> TrainBatch:
        """Seven sequences over the model's vocabulary."""
        with torch.no_grad():
            return make_batch(reference(torch.zeros(1, dtype=torch.int64)).shape[-1], seed=first_seed(0))


def _request(head: str, outputs: frozenset[str]) -> OutputRequest:
    names: Any = {"lm": {"logprobs", "entropy"} & outputs, "value": {"values"}, "reward": {"scores"}}[head]
    return OutputRequest(frozenset(names))


def _part(outputs: Outputs, name: str, batch: TrainBatch, index: int) -> torch.Tensor:
    if name == "scores":
        return outputs[name][index : index + 1]
    return sequences(batch, outputs[name])[index]


def _same(left: Trainer, right: Trainer) -> bool:
    one, other = stream(left), stream(right)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
