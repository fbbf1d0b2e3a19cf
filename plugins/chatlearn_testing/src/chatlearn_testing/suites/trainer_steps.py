"""The contract of a trainer's steps: temperature, clipping, learning rate, and the work that it must refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor

from chatlearn_core.exceptions import BackendError
from chatlearn_core.protocols import LossOutput, MemoryPart
from chatlearn_core.types import OutputRequest, Outputs, TrainBatch
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.batches import (
    MaskedPolicyLoss,
    make_batch,
    reference_entropy,
    reference_loss,
    sequences,
)
from chatlearn_testing.suites.conformance_suite import ConformanceSuite
from chatlearn_testing.suites.trainer_fixtures import (
    RELATIVE,
    MakeTrainer,
    TrainerFixtures,
    assert_close,
    logprobs_of,
    stream,
)

TEMPERATURE = 0.7
UNUSUAL_RATE = 1.7e-3
"""A learning rate that is no library's default, so that an ignored option is noticed."""
STEP_TOLERANCE = 1e-2
"""Accepted relative error of the length of a step, and of a step's difference from an equal one, by norm."""
CLIPPED_TO = 0.25
"""The clipping test allows this fraction of the first step's gradient norm. A power of two scales gradients exactly."""
Fault = Literal["infinite loss", "NaN loss", "infinite gradient", "NaN gradient"]


class TrainerStepsContract(TrainerFixtures, ConformanceSuite):
    """The part of ``TrainerConformance`` about single steps."""

    settable: ClassVar[frozenset[str]] = frozenset({"clip_option", "schedule_options", "has_known_step"})
    clip_option: ClassVar[str] = "grad_clip"
    """Name of the option that bounds the gradient norm. Without an option of that name, clipping is not tested."""
    schedule_options: ClassVar[Mapping[str, Any] | None] = None
    """Options under which the learning rate differs between the first three updates; None: ``warmup_steps: 4``, if
    there is such an option, and otherwise no schedule is tested.
    """
    has_known_step: ClassVar[bool] = True
    """False if the optimizer is neither of Adam's kind (elements move by the learning rate) nor gradient descent."""

    def test_outputs_are_those_asked_for(self, make_trainer: MakeTrainer, batch: TrainBatch) -> None:
        """``compute`` returns the requested outputs and no others, on the host and without a graph; logprobs and
        entropies are float32.
        """
        trainer = make_trainer()
        names = sorted({"logprobs", "entropy"} & self.record().outputs)
        for asked in (*({name} for name in names), set(names)):
            outputs = trainer.compute(batch, OutputRequest(frozenset(asked)))
            assert outputs.keys() == asked, f"asked for {sorted(asked)}, got {sorted(outputs)}"
            for name, values in outputs.items():
                assert values.dtype == torch.float32, f"{name} is {values.dtype}"
                assert values.device.type == "cpu", f"{name} is on {values.device}"
                assert not values.requires_grad, f"{name} keeps the graph of its forward pass"

    def test_the_temperature_holds_for_every_output_and_the_loss(
        self, make_trainer: MakeTrainer, reference: torch.nn.Module, batch: TrainBatch
    ) -> None:
        """At temperature 0.7, entropies, the loss of an update and its gradient norm equal a plain forward's.

        Right only at temperature 1: ``compute`` applies ``OutputRequest.temperature`` and ``update`` does not, or the
        entropy comes from the unscaled logits.
        """
        trainer, loss = make_trainer(), MaskedPolicyLoss(TEMPERATURE)
        if "entropy" in self.record().outputs:
            outputs = trainer.compute(batch, OutputRequest(frozenset({"entropy"}), TEMPERATURE))
            with torch.no_grad():
                alone = [reference_entropy(reference, ids, TEMPERATURE) for ids in sequences(batch, batch.token_ids)]
            assert_close(outputs["entropy"], torch.cat(alone) * batch.loss_mask, "entropy")
        metrics = trainer.update(loss.prepare(batch), loss)
        reference.zero_grad(set_to_none=True)
        expected = reference_loss(reference, batch, TEMPERATURE)
        expected.backward()  # type: ignore[no-untyped-call]  # torch
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in reference.parameters() if p.grad is not None]))
        assert metrics["loss"].value == pytest.approx(float(expected.detach()), rel=RELATIVE, abs=1e-6)
        assert metrics["grad_norm"].value == pytest.approx(norm, rel=RELATIVE)

    def test_compute_leaves_no_gradient(self, make_trainer: MakeTrainer, batch: TrainBatch) -> None:
        """Computing outputs before an update changes neither the update's metrics nor the weights after it."""
        computing, other, loss = make_trainer(), make_trainer(), MaskedPolicyLoss()
        for _ in range(2):
            logprobs_of(computing, batch)
            found, expected = (trainer.update(loss.prepare(batch), loss) for trainer in (computing, other))
            assert found["grad_norm"].value == expected["grad_norm"].value, "computing changed the gradient norm"
        _assert_equal(stream(computing), stream(other), "computing changed the next updates")

    def test_a_step_is_as_long_as_its_rate(self, make_trainer: MakeTrainer, batch: TrainBatch) -> None:
        """``update`` makes one optimizer step with the rate that ``lr`` reports; the first is ``learning_rate``.

        The suite knows the first step of Adam's kind, where elements move by the rate, and of gradient descent, where
        the weights move by the rate times the clipped gradient norm. Too long: two steps, or gradients of an earlier
        update were added. Another length: ``lr`` is not the rate that was used, because the schedule advances before
        the step.
        """
        options: dict[str, Any] = {"learning_rate": UNUSUAL_RATE, "weight_decay": 0.0}
        preferred = self.make_options(**options)
        trainer, loss = make_trainer(**options), MaskedPolicyLoss()
        before = stream(trainer)
        metrics = trainer.update(loss.prepare(batch), loss)
        rate, norm = metrics["lr"].value, metrics["grad_norm"].value
        wanted = getattr(preferred, "learning_rate", rate)
        assert rate == pytest.approx(wanted, rel=1e-6), f"lr is {rate}, the option learning_rate {wanted}"
        if not self.has_known_step:
            not_applicable("the suite sets has_known_step to False")
        change = torch.cat([(after - before[name]).double().flatten() for name, after in stream(trainer).items()])
        bound = getattr(preferred, self.clip_option, None) or norm
        lengths = {
            "an element, with Adam": (float(change[change != 0].abs().median()), rate),
            "all weights, with gradient descent": (float(change.norm()), rate * min(norm, bound)),
        }
        assert any(found == pytest.approx(length, rel=STEP_TOLERANCE) for found, length in lengths.values()), (
            f"with lr {rate}, neither moved as far as one step: "
            + "; ".join(f"{what}: by {found:.3g} instead of {length:.3g}" for what, (found, length) in lengths.items())
        )

    def test_gradients_of_an_update_do_not_reach_the_next(self, make_trainer: MakeTrainer, batch: TrainBatch) -> None:
        """A second batch whose loss is zero has gradient norm zero: every update begins without gradients."""
        trainer, loss = make_trainer(), MaskedPolicyLoss()
        trainer.update(loss.prepare(batch), loss)
        metrics = trainer.update(loss.prepare(_scaled(batch, 0.0)), loss)
        assert metrics["grad_norm"].value == 0.0, f"the gradient norm of a zero loss is {metrics['grad_norm'].value}"

    def test_an_update_that_fails_leaves_no_gradients(self, make_trainer: MakeTrainer, batch: TrainBatch) -> None:
        """A loss that raises in its second micro-batch raises out of ``update``, and the next update is as if there had
        been none: the gradients of the first micro-batch are gone, and no step was counted.
        """
        options = self.small_micro_batches()
        trainer, other, loss = make_trainer(**options), make_trainer(**options), MaskedPolicyLoss()
        failing = _FailingLoss(loss)
        try:
            trainer.update(loss.prepare(batch), failing)
        except RuntimeError as error:
            if _FAILURE not in str(error):
                raise
        else:
            assert failing.calls == 1, "update swallowed the error of its loss"
            not_applicable("the batch is one micro-batch")
        found, expected = (each.update(loss.prepare(batch), loss) for each in (trainer, other))
        assert found["grad_norm"].value == expected["grad_norm"].value, "gradients of the failed update stayed"
        _assert_equal(stream(trainer), stream(other), "the failed update changed the next one")

    def test_large_gradients_are_clipped_once_by_their_norm(
        self, make_trainer: MakeTrainer, reference: torch.nn.Module, batch: TrainBatch
    ) -> None:
        """Clipping acts on the whole mini-batch's gradient, by its norm over all parameters, and ``grad_norm`` is the
        norm before it: a clipped step equals the unclipped step of a loss scaled down to the permitted norm, and a
        gradient within the bound stays as it is.

        A different step: each micro-batch or parameter is clipped by itself, elements are clipped by value, or the
        gradient is always normalised. No difference from an unclipped trainer: the bound has no effect.
        """
        if self.clip_option not in self.options_model().model_fields:
            not_applicable(f"there is no option {self.clip_option!r}")
        with torch.no_grad():
            other = make_batch(reference(torch.zeros(1, dtype=torch.int64)).shape[-1], seed=1)
        loss, far = MaskedPolicyLoss(), {self.clip_option: 1e9}
        scaled = make_trainer(**far)
        bound = scaled.update(loss.prepare(_scaled(batch, CLIPPED_TO)), loss)["grad_norm"].value
        clipped = make_trainer(**{self.clip_option: bound}, **self.small_micro_batches())
        unclipped = make_trainer(**far)
        for trainer in (clipped, unclipped):
            norm = trainer.update(loss.prepare(batch), loss)["grad_norm"].value
            assert norm == pytest.approx(bound / CLIPPED_TO, rel=RELATIVE), "grad_norm is not the norm before clipping"
        small = _scaled(other, CLIPPED_TO / 16)
        for trainer in (scaled, clipped, unclipped):
            norm = trainer.update(loss.prepare(small), loss)["grad_norm"].value
            assert norm < bound, "the suite's second batch has an unexpectedly large gradient"
        start, wanted, found, without = (stream(t) for t in (make_trainer(), scaled, clipped, unclipped))
        assert _apart(start, wanted, without) > STEP_TOLERANCE, "the suite cannot tell a clipped step of this optimizer"
        apart = _apart(start, wanted, found)
        assert apart <= STEP_TOLERANCE, (
            f"two steps, of which the first is clipped to {bound}, are {apart:.1%} off; "
            f"without clipping they would be {_apart(start, wanted, without):.1%} off"
        )

    def test_the_rate_of_a_schedule_is_reported(self, make_trainer: MakeTrainer, batch: TrainBatch) -> None:
        """Under a schedule, ``lr`` is the rate of that update: the first step equals that of a trainer which has this
        rate as its ``learning_rate``.
        """
        options, loss = self._schedule(), MaskedPolicyLoss()
        scheduled = make_trainer(**options)
        rates = [scheduled.update(loss.prepare(batch), loss)["lr"].value]
        after_first = stream(scheduled)
        rates += [scheduled.update(loss.prepare(batch), loss)["lr"].value for _ in range(2)]
        assert len(set(rates)) > 1, f"schedule_options {options} give {rates}; set options under which they differ"
        if "learning_rate" not in self.options_model().model_fields:
            not_applicable("there is no option learning_rate to compare the schedule with")
        if "learning_rate" in self.options:
            not_applicable("the suite's options set the learning_rate")
        constant = make_trainer(learning_rate=rates[0])
        constant.update(loss.prepare(batch), loss)
        apart = _apart(stream(make_trainer()), stream(constant), after_first)
        assert apart <= STEP_TOLERANCE, f"the first step is {apart:.1%} off one with the reported rate {rates[0]}"

    @pytest.mark.parametrize("fault", ["infinite loss", "NaN loss", "infinite gradient", "NaN gradient"])
    def test_what_is_not_finite_on_its_own_is_refused(
        self, make_trainer: MakeTrainer, batch: TrainBatch, fault: Fault
    ) -> None:
        """A loss that is not finite with finite gradients raises a ``BackendError`` that names a sample, and so do
        gradients that are not finite under a finite loss. Weights, optimizer and the next step are unaffected.

        Accepted: only one of the two is tested, or with ``isnan``, which infinity passes.
        """
        trainer, other, loss = make_trainer(), make_trainer(), MaskedPolicyLoss()
        for each in (trainer, other):
            each.update(loss.prepare(batch), loss)
        before = stream(trainer)
        with pytest.raises(BackendError) as caught:
            trainer.update(loss.prepare(batch), _FaultyLoss(fault))
        assert any(name in str(caught.value) for name in batch.sample_ids), f"names no sample: {caught.value}"
        _assert_equal(stream(trainer), before, "the refused step changed the weights")
        found, expected = (each.update(loss.prepare(batch), loss) for each in (trainer, other))
        assert found["grad_norm"].value == expected["grad_norm"].value, "gradients of the refused step stayed"
        _assert_equal(stream(trainer), stream(other), "the refused step changed the next one")

    @pytest.mark.parametrize("part", ["weights", "gradients", "optimizer"])
    def test_offloaded_parts_are_not_worked_with(
        self, make_trainer: MakeTrainer, batch: TrainBatch, part: MemoryPart
    ) -> None:
        """While a part is offloaded, the calls that need it raise a ``BackendError`` that names it: ``compute`` and
        ``weights`` need the weights, ``update`` needs all three.

        Otherwise the trainer quietly brings back memory that another role uses by now, or works on stale values.
        """
        trainer, other, loss = make_trainer(), make_trainer(), MaskedPolicyLoss()
        for each in (trainer, other):
            each.update(loss.prepare(batch), loss)
        trainer.offload({part})
        calls: dict[str, Callable[[], object]] = {"update": lambda: trainer.update(loss.prepare(batch), loss)}
        if part == "weights":
            calls |= {"compute": lambda: logprobs_of(trainer, batch), "weights": lambda: stream(trainer)}
        for name, call in calls.items():
            with pytest.raises(BackendError) as caught:
                call()
            assert part in str(caught.value), f"{name} does not say that {part} is away: {caught.value}"
        trainer.onload({part})
        for each in (trainer, other):
            each.update(loss.prepare(batch), loss)
        _assert_equal(stream(trainer), stream(other), "the refused calls changed the next step")

    @classmethod
    def _schedule(cls) -> dict[str, Any]:
        if cls.schedule_options is not None:
            return dict(cls.schedule_options)
        if "warmup_steps" not in cls.options_model().model_fields:
            not_applicable("there is no option warmup_steps, and the suite sets no schedule_options")
        return {"warmup_steps": 4}


_FAILURE = "this loss fails in its second micro-batch"


class _FailingLoss:
    """A loss that raises in its second call."""

    def __init__(self, loss: MaskedPolicyLoss) -> None:
        self.needs, self.unit, self.prepare = loss.needs, loss.unit, loss.prepare
        self.calls = 0
        self._loss = loss

    def __call__(self, outputs: Outputs, batch: TrainBatch) -> LossOutput:
        """See ``Loss``."""
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError(_FAILURE)
        return self._loss(outputs, batch)


@dataclass(frozen=True)
class _FaultyLoss(MaskedPolicyLoss):
    """``MaskedPolicyLoss`` with a fault in either the value or the gradient."""

    fault: Fault = "NaN loss"

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        object.__setattr__(self, "fault", fault)

    def __call__(self, outputs: Outputs, batch: TrainBatch) -> LossOutput:
        """See ``Loss``."""
        value = torch.inf if self.fault.startswith("infinite") else torch.nan
        if self.fault.endswith("gradient"):
            logprobs: Tensor = _FaultyGradient.apply(outputs["logprobs"], value)  # type: ignore[no-untyped-call]  # torch
            return super().__call__(outputs | {"logprobs": logprobs}, batch)
        result = super().__call__(outputs, batch)
        return replace(result, total=result.total + value)


class _FaultyGradient(torch.autograd.Function):
    """The identity; its gradient is one value that is not finite."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, fault: float) -> Tensor:
        ctx.fault = fault
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.full_like(gradient, ctx.fault), None


def _scaled(batch: TrainBatch, factor: float) -> TrainBatch:
    """Return the batch with its advantages, and with them the loss and all gradients, times ``factor``."""
    return replace(batch, token_data=batch.token_data | {"advantages": batch.token_data["advantages"] * factor})


def _apart(start: Mapping[str, Tensor], wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> float:
    """Return the difference of two changes from ``start``, relative to the first, by the norm over all tensors."""
    distance = sum(float((found[name] - wanted[name]).double().pow(2).sum()) for name in start)
    length = sum(float((wanted[name] - start[name]).double().pow(2).sum()) for name in start)
    return float((distance / max(length, 1e-30)) ** 0.5)


def _assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different, f"{what}: {', '.join(different)}"
