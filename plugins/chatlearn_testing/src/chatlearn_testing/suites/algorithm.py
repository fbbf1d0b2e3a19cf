"""The contract of an algorithm: what it learns depends on the samples, not on how they are packed, ordered or cut."""

from __future__ import annotations

import json
import math
import pickle
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, get_args

import pytest
import torch
from torch import Tensor

from chatlearn_core.exceptions import ChatLearnError
from chatlearn_core.plugins.records import Kind
from chatlearn_core.protocols import Algorithm, AlgorithmContext, LossOutput, RoleUpdate, Unit
from chatlearn_core.types import (
    Derived,
    Example,
    Metrics,
    Outputs,
    RewardResult,
    Sample,
    SamplingParams,
    TrainBatch,
    merge_metrics,
)
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.process_state import process_state
from chatlearn_testing.suites.algorithm_roles import sequence_rows
from chatlearn_testing.suites.algorithm_step import (
    MAX_TOKENS,
    TEMPERATURE,
    AlgorithmSetup,
    AlgorithmStep,
    gradients,
    leaves,
    reordered,
    scored,
    selected,
    slopes,
)
from chatlearn_testing.suites.conformance_suite import ConformanceSuite, installed_plugins

NEAR = (1e-4, 1e-6)
"""Relative and absolute tolerance of float32 data that was summed in another order."""
EXACT = (1e-9, 1e-12)
"""Relative and absolute tolerance of float64 sums in another order."""
DRIFT = 0.3
"""How far the updated weights are from those that sampled, so that some ratios are clipped."""
Ready = tuple[RoleUpdate, TrainBatch, Outputs]
"""An update, its whole mini-batch after ``prepare``, and the outputs that it asks for, float64."""


class AlgorithmConformance(ConformanceSuite):
    """Contract tests that every algorithm must pass.

    A subclass sets ``backend`` and, where they differ from the defaults, the attributes in ``settable``. The kit plays
    the flow with roles of its own: small tables that give exact logprobs, values and scores.
    """

    kind: ClassVar[Kind] = "algorithm"
    settable: ClassVar[frozenset[str]] = frozenset(
        {"roles", "sampling", "examples", "reward_components", "reward_steps", "detaches"}
    )
    roles: ClassVar[Mapping[str, str]] = {}
    """Further roles (name -> kind) that the options ask for, such as ``{"reference": "trainer"}`` of a KL."""
    sampling: ClassVar[Mapping[str, Any]] = {}
    """Sampling parameters besides length and temperature: ``{"top_k": 8, "max_kept_ids": 8}``."""
    examples: ClassVar[Sequence[Example]] = ()
    """Examples of the algorithm's ``input``, with token ids below 80; by default prompts, demonstrations, or
    completions with ranks or labels."""
    reward_components: ClassVar[Sequence[str]] = ()
    """Components that the algorithm reads of rewards."""
    reward_steps: ClassVar[bool] = False
    """Whether rewards have rewards of steps."""
    detaches: ClassVar[bool] = False
    """Whether a loss treats functions of its outputs as constants (``detach``), as CISPO does its weights. Gradients
    are then compared with differences of a loss in which these stay as they are."""

    def test_flow_names_its_roles(self) -> None:
        """The flow can be traced with the roles of the record (or ``required_roles`` of the options); updates are of
        trainer roles, ask for outputs that a plugin describes, and name a unit.
        """
        step = self._step()
        roles = self._roles()
        assert step.learners, "updates() gives no update in steps 1 to 3"
        for update in (update for number in range(1, 4) for update in step.updates(number)):
            assert roles.get(update.role) == "trainer", f"updates the role {update.role!r}; there are {roles}"
            assert update.loss.unit in get_args(Unit), f"a loss has the unit {update.loss.unit!r}"
            unknown = update.loss.needs.names - installed_plugins().outputs.keys()
            assert not unknown, f"a loss needs {sorted(unknown)}, which no installed plugin describes"
        if step.algorithm.policy is not None:
            assert step.algorithm.policy in step.learners, f"policy is {step.algorithm.policy!r}, which is not updated"

    def test_advantages_are_finite_and_fit_the_batch(self) -> None:
        """``advantages`` gives one row for each token or sequence, finite numbers, and excludes samples of the batch
        alone, with a reason; not all of them.
        """
        step = self._step()
        batch = scored(step.samples())
        self._check_derived(step.algorithm.advantages(batch, 1), batch)
        excluded = step.algorithm.advantages(batch, 1).exclusions
        assert len(excluded) < batch.num_sequences, f"excludes all {batch.num_sequences} samples: {excluded}"

    @pytest.mark.parametrize("case", ["equal", "alone", "short", "large"])
    def test_odd_rewards_give_finite_advantages(self, case: str) -> None:
        """Groups with equal rewards, a group of one sample, completions of one token, rewards of ±1e6: all numbers
        stay finite. Rewards may be refused, with an error of ChatLearn's that names the sample.

        Usual causes: division by a standard deviation or a count of 0.
        """
        step = self._step()
        samples = step.samples()
        if case == "alone":
            first = samples[0].group_id
            samples = [samples[0], *(sample for sample in samples if sample.group_id != first)]
        for number, sample in enumerate(samples):
            if case == "short":
                _shorten(sample)
            if sample.reward is not None and case in ("equal", "large"):
                value = 1.0 if case == "equal" else (-1e6, 1e6)[number % 2]
                sample.reward = replace(sample.reward, value=value)
        batch = scored(samples)
        try:
            derived = step.algorithm.advantages(batch, 1)
        except ChatLearnError as error:
            if case == "large" and any(name in str(error) for name in batch.sample_ids):
                return
            raise
        self._check_derived(derived, batch)

    def test_advantages_follow_the_samples_not_their_order(self) -> None:
        """Each sample gets the same data whatever its place, also if the samples of a group do not stand together.

        Usual causes: groups found by reshaping to [groups, group_size], or by ``group_index`` as a position.
        """
        step = self._step()
        batch = scored(step.samples())
        order = list(range(batch.num_sequences))
        random.Random(3).shuffle(order)
        shuffled = reordered(batch, order)
        self._same(step.algorithm.advantages(batch, 1), batch, step.algorithm.advantages(shuffled, 1), shuffled)

    def test_advantages_of_a_group_need_no_other_group(self) -> None:
        """With ``advantage_split = "group"``, whole groups give the same data alone as together: a run divides them
        over ranks. An algorithm that needs all samples sets ``advantage_split = "batch"``.
        """
        step = self._step()
        if step.algorithm.advantage_split != "group":
            not_applicable(f"the algorithm declares advantage_split={step.algorithm.advantage_split!r}")
        batch = scored(_uneven(step.samples()))
        whole, metrics = step.algorithm.advantages(batch, 1), list[Metrics]()
        for group in sorted(set(batch.group_index.tolist())):
            part = reordered(batch, [i for i, own in enumerate(batch.group_index.tolist()) if own == group])
            alone = step.algorithm.advantages(part, 1)
            metrics.append(alone.metrics)
            self._same(whole, batch, alone, part, only=part.sample_ids)
        _same_metrics(whole.metrics, merge_metrics(*metrics), "of all groups together and group by group")

    def test_advantages_change_nothing(self) -> None:
        """``advantages`` leaves its batch and the process as they were, and gives the same again."""
        step = self._step()
        batch = scored(step.samples())
        before, state = pickle.dumps(_content(batch)), process_state()
        first = step.algorithm.advantages(batch, 1)
        assert pickle.dumps(_content(batch)) == before, "advantages() changed its batch"
        assert process_state() == state, "advantages() changed state of the process, such as random numbers"
        self._same(first, batch, step.algorithm.advantages(batch, 1), batch)

    def test_tokens_outside_the_mask_do_not_count(self) -> None:
        """Outputs and token data where ``loss_mask`` is False change neither loss nor gradient, and get no gradient.

        Prompts, answers of environments and padding are not the policy's. A loss applies the mask itself.
        """
        for update, batch, outputs in self._prepared():
            plain = leaves(outputs)
            found = gradients(update.loss(plain, batch), plain)
            raw = self._batch_of(update)
            noisy = replace(raw, token_data={name: _noise(values, raw) for name, values in raw.token_data.items()})
            noisy_batch = update.loss.prepare(noisy)
            changed = leaves({name: _noise(values.detach(), batch) for name, values in outputs.items()})
            made = update.loss(changed, noisy_batch)
            total = float(update.loss(plain, batch).total.detach())
            assert float(made.total.detach()) == pytest.approx(total, rel=1e-9, abs=1e-12), (
                f"the loss of {update.role!r} changes with values outside the loss mask"
            )
            for name, gradient in gradients(made, changed).items():
                if gradient.shape[:1] == batch.loss_mask.shape:
                    outside = gradient[~batch.loss_mask]
                    assert not outside.any(), f"{name} has a gradient outside the loss mask of {update.role!r}"
                _close(gradient, found[name], f"the gradient of {name} changes with values outside the loss mask")

    def test_gradients_are_those_of_the_loss(self) -> None:
        """In random directions of the outputs, the gradient equals central differences of the loss, in float64, and is
        not 0.

        Usual causes: ``detach`` or ``no_grad`` around a part of the loss, ``item()``, values cast to float32. An
        algorithm that means constants sets ``detaches = True``.
        """
        for update, batch, outputs in self._prepared():
            found = slopes(update.loss, outputs, batch, frozen=self.detaches)
            assert any(slope != 0.0 for _, slope, _ in found), f"the loss of {update.role!r} has no gradient"
            for name, slope, difference in found:
                assert math.isclose(slope, difference, rel_tol=1e-4, abs_tol=1e-7), (
                    f"{update.role!r}, {name}: the gradient gives a slope of {slope:.8g}, the loss {difference:.8g}"
                )

    @pytest.mark.parametrize("num_parts", [2, 3, 64])
    def test_micro_batches_add_up(self, num_parts: int) -> None:
        """However whole units are cut into micro-batches, losses, gradients and metrics add up to those of the batch.

        Usual causes: a mean inside the loss instead of a weight that ``prepare`` writes; a unit smaller than what the
        loss compares; a metric without its count.
        """
        for update, batch, outputs in self._prepared():
            whole_outputs = leaves(outputs)
            whole = update.loss(whole_outputs, batch)
            expected = gradients(whole, whole_outputs)
            cut_outputs = leaves(outputs)
            per_sequence = _per_sequence(outputs)
            units = sorted(set(batch.unit_index.tolist()))
            random.Random(num_parts).shuffle(units)
            parts = list[LossOutput]()
            for number in range(num_parts):
                own = set(units[number::num_parts])
                indices = [i for i, unit in enumerate(batch.unit_index.tolist()) if unit in own]
                part = selected(cut_outputs, batch, indices, per_sequence)
                parts.append(update.loss(part, batch.select(indices)))
            total = torch.stack([made.total.double() for made in parts]).sum()
            _close(total.detach(), whole.total.detach(), f"the losses of {num_parts} micro-batches of {update.role!r}")
            found = gradients(LossOutput(total), cut_outputs)
            for name, gradient in expected.items():
                _close(found[name], gradient, f"the gradients of {name} in {num_parts} micro-batches")
            merged = merge_metrics(*(made.metrics for made in parts))
            _same_metrics(whole.metrics, merged, f"in one and in {num_parts} micro-batches")

    def test_order_of_samples_does_not_matter(self) -> None:
        """A mini-batch in another order has the same loss, and each sample the same gradient."""
        for update, batch, outputs in self._prepared():
            plain = leaves(outputs)
            made = update.loss(plain, batch)
            expected = gradients(made, plain)
            raw = self._batch_of(update)
            order = list(range(batch.num_sequences))
            random.Random(7).shuffle(order)
            other = update.loss.prepare(reordered(raw, order))
            moved = leaves(selected(outputs, batch, order, _per_sequence(outputs)))
            again = update.loss(moved, other)
            _close(again.total.detach(), made.total.detach(), f"the loss of {update.role!r} in another order")
            found = gradients(again, moved)
            for name, gradient in selected(expected, batch, order, _per_sequence(outputs)).items():
                _close(found[name], gradient, f"the gradient of {name} in another order")

    def test_an_empty_micro_batch_is_a_connected_zero(self) -> None:
        """A rank without samples gets an empty batch: the loss is 0 and has a graph, or its backward pass would leave
        the other ranks waiting.
        """
        for update, batch, outputs in self._prepared():
            nothing = leaves(selected(outputs, batch, [], _per_sequence(outputs)))
            made = update.loss(nothing, batch.select([]))
            assert float(made.total.detach()) == 0.0, (
                f"the loss of no samples of {update.role!r} is {float(made.total.detach())}"
            )
            assert made.total.requires_grad, f"the loss of no samples of {update.role!r} is not connected to the graph"

    def test_losses_are_values(self) -> None:
        """A loss can be pickled, changes neither batch nor outputs, and gives the same again: it is sent to workers,
        and called for many micro-batches.
        """
        for update, batch, outputs in self._prepared():
            raw = self._batch_of(update)
            before, state = pickle.dumps(_content(raw)), process_state()
            prepared = update.loss.prepare(raw)
            assert pickle.dumps(_content(raw)) == before, f"prepare() of {update.role!r} changed its batch"
            content = pickle.dumps(_content(prepared))
            given = {name: values.detach().clone() for name, values in outputs.items()}
            sent = pickle.loads(pickle.dumps(update.loss))
            totals = [float(loss(given, prepared).total) for loss in (update.loss, update.loss, sent)]
            assert totals[1:] == totals[:1] * 2, f"called again, and after pickling, {update.role!r} gives {totals}"
            assert pickle.dumps(_content(prepared)) == content, f"the loss of {update.role!r} changed its batch"
            for name, values in given.items():
                assert torch.equal(values, outputs[name]), f"the loss of {update.role!r} changed {name} in place"
            assert process_state() == state, f"the loss of {update.role!r} changed state of the process"
            assert batch.num_sequences, "all samples are excluded"

    def test_compared_outputs_have_one_temperature(self) -> None:
        """A loss that reads logprobs which the flow computed asks for its own at the same temperature: a ratio of two
        distributions means nothing. The context's ``basis`` holds the temperature of the samples.
        """
        step = self._step()
        computed = {
            field: (name, node.arguments.get("temperature", TEMPERATURE))
            for node in step.graph.nodes
            for name, field in node.output_fields.items()
            if installed_plugins().outputs[name].head == "lm"
        }
        computed["generator_logprobs"] = ("logprobs", TEMPERATURE)
        for update, batch, outputs in self._prepared():
            read = _Reads(batch.token_data)
            update.loss(leaves(outputs), replace(batch, token_data=read))
            needs = update.loss.needs
            for field in read.names & computed.keys():
                output, temperature = computed[field]
                assert output not in needs.names or needs.temperature == temperature, (
                    f"{update.role!r} compares its {output} at temperature {needs.temperature} with {field}, which were"
                    f" computed at {temperature}: OutputRequest(names, context.basis.temperature)"
                )

    def test_state_comes_back(self) -> None:
        """``state_dict`` after a step is JSON, and another object that loads it plans the same updates."""
        step, other = self._step(), self._step()
        metrics = {name: metric.value for name, metric in step.train().items()}
        step.algorithm.after_step(1, metrics | {"samples/trained": 8.0})
        state = step.algorithm.state_dict()
        other.algorithm.load_state_dict(json.loads(json.dumps(state)))
        assert other.algorithm.state_dict() == state
        first, second = (pickle.dumps([update.loss for update in one.updates(2)]) for one in (step, other))
        assert first == second, "after load_state_dict, the losses of the next step differ"

    @pytest.mark.parametrize("num_parts", [1, 3])
    def test_a_step_trains(self, num_parts: int) -> None:
        """Flow, advantages and updates of a whole step: the weights of every updated role move, no others do, metrics
        are finite, and cutting each mini-batch in three moves them the same way.
        """
        step, expected = AlgorithmStep(self._setup(), num_parts), AlgorithmStep(self._setup())
        metrics = step.train()
        expected.train()
        assert all(math.isfinite(metric.value) for metric in metrics.values()), metrics
        fresh = AlgorithmStep(self._setup()).roles.trainers
        updated = {update.role for update in step.updates(1)}
        for name, trainer in step.roles.trainers.items():
            assert (trainer.updates > 0) == (name in updated), f"{name!r} was updated {trainer.updates} times"
            tables = trainer.tables.items()
            moved = any(not torch.equal(values, fresh[name].table(table, *values.shape)) for table, values in tables)
            assert moved == (name in updated), f"the weights of {name!r} {'moved' if moved else 'did not move'}"
            for table, values in tables:
                _close(values, expected.roles.trainers[name].table(table, *values.shape), f"{table} of {name!r}")

    def test_wants_a_possible_number_of_examples(self) -> None:
        """``wanted`` is a whole number, 0 or more."""
        step = self._step()
        number = step.algorithm.wanted(step.samples())
        assert type(number) is int, f"wanted() gives {number!r}"
        assert number >= 0, f"wanted() gives {number}"

    @classmethod
    def _roles(cls) -> dict[str, str]:
        options = cls.make_options()
        declared = cls.record().roles or getattr(options, "required_roles", ())
        return dict(declared) | dict(cls.roles)

    @classmethod
    def _setup(cls) -> AlgorithmSetup:
        options = cls.make_options()

        def make(context: AlgorithmContext) -> Algorithm:
            made: Algorithm = cls.build()(options, context)
            return made

        sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=TEMPERATURE, **cls.sampling)
        return AlgorithmSetup(
            installed_plugins(),
            make,
            cls._roles(),
            sampling,
            cls.examples,
            cls.reward_components,
            cls.reward_steps,
        )

    def _step(self) -> AlgorithmStep:
        return AlgorithmStep(self._setup())

    def _prepared(self) -> list[Ready]:
        """Each role's first update with its prepared batch, and outputs of weights some updates later."""
        step = self._step()
        samples = step.samples()
        step.derived(samples)
        ready = list[Ready]()
        for update, batch in step.batches(samples):
            prepared = update.loss.prepare(batch)
            trainer = step.roles.trainers[update.role].nudged(DRIFT)
            ready.append((update, prepared, trainer.outputs(prepared, update.loss.needs)))
        return ready

    def _batch_of(self, wanted: RoleUpdate) -> TrainBatch:
        """The batch of an update before ``prepare``."""
        step = self._step()
        samples = step.samples()
        step.derived(samples)
        return next(batch for update, batch in step.batches(samples) if update.role == wanted.role)

    def _check_derived(self, derived: Derived, batch: TrainBatch) -> None:
        kept = [name not in derived.exclusions for name in batch.sample_ids]
        of_tokens = torch.tensor(kept)[batch.sequence_index] & batch.loss_mask
        for name, values in derived.token_data.items():
            assert values.shape[:1] == (batch.num_tokens,), (
                f"{name}: {list(values.shape)} for {batch.num_tokens} tokens"
            )
            assert values[of_tokens].isfinite().all(), f"token_data {name!r} is not finite: {values[of_tokens]}"
        for name, values in derived.sequence_data.items():
            rows = batch.num_sequences
            assert values.shape[:1] == (rows,), f"{name}: {list(values.shape)} for {rows} sequences"
            assert values[torch.tensor(kept)].isfinite().all(), f"sequence_data {name!r} is not finite: {values}"
        unknown = derived.exclusions.keys() - set(batch.sample_ids)
        assert not unknown, f"excludes {sorted(unknown)}, which are not in the batch"
        assert all(isinstance(reason, str) and reason for reason in derived.exclusions.values()), derived.exclusions
        for name, metric in derived.metrics.items():
            assert math.isfinite(metric.value), f"metric {name!r} is {metric.value}"

    def _same(
        self, first: Derived, batch: TrainBatch, second: Derived, other: TrainBatch, only: Sequence[str] | None = None
    ) -> None:
        """Compare what two calls gave each sample."""
        names = batch.sample_ids if only is None else only
        assert first.token_data.keys() == second.token_data.keys()
        assert first.sequence_data.keys() == second.sequence_data.keys()
        exclusions = {name: reason for name, reason in first.exclusions.items() if name in names}
        assert exclusions == second.exclusions, f"exclusions differ: {exclusions}, {second.exclusions}"
        kept = [name for name in names if name not in exclusions]
        for field, values in first.token_data.items():
            rows, others = sequence_rows(batch, values), sequence_rows(other, second.token_data[field])
            for name in kept:
                _close(others[name], rows[name], f"{field} of sample {name!r}", NEAR)
        for field, values in first.sequence_data.items():
            places = {name: place for place, name in enumerate(other.sample_ids)}
            for place, name in enumerate(batch.sample_ids):
                if name in kept:
                    found = second.sequence_data[field][places[name]]
                    _close(found, values[place], f"{field} of sample {name!r}", NEAR)


class _Reads(dict[str, Tensor]):
    """Token data that notes which were read."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__(values)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


def _close(found: Tensor, expected: Tensor, what: str, tolerance: tuple[float, float] = EXACT) -> None:
    relative, absolute = tolerance
    torch.testing.assert_close(
        found.double(),
        expected.double(),
        rtol=relative,
        atol=absolute,
        msg=lambda text: f"{what} differ(s): {text}",
    )


def _same_metrics(first: Metrics, second: Metrics, what: str) -> None:
    assert first.keys() == second.keys(), f"metrics {what}: {sorted(first.keys() ^ second.keys())} are only in one"
    for name, metric in first.items():
        found = second[name].value
        assert math.isclose(found, metric.value, rel_tol=1e-4, abs_tol=1e-6), (
            f"metric {name!r} {what}: {metric.value}, {found}; Metric(total, count) holds a sum and what it is of"
        )


def _per_sequence(outputs: Mapping[str, Tensor]) -> set[str]:
    specs = installed_plugins().outputs
    return {name for name in outputs if specs[name].per == "sequence"}


def _noise(values: Tensor, batch: TrainBatch) -> Tensor:
    """Per-token numbers with others where the mask is False; everything else as it is."""
    if values.shape[:1] != batch.loss_mask.shape or not values.is_floating_point():
        return values
    drawn = torch.rand(values.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(values.dtype)
    return torch.where(batch.loss_mask.view(-1, *[1] * (values.ndim - 1)), values, -0.5 - drawn)


def _uneven(samples: Sequence[Sample]) -> list[Sample]:
    """The samples without the last of the first group, if three or more are in it: means over groups of one size would
    hide what they are means of.
    """
    first = [sample for sample in samples if sample.group_id == samples[0].group_id]
    return [sample for sample in samples if len(first) < 3 or sample is not first[-1]]


def _shorten(sample: Sample) -> None:
    """Cut a sample after its first trained token."""
    stop = int(sample.loss_mask.argmax()) + 1
    sample.token_ids, sample.loss_mask = sample.token_ids[:stop], sample.loss_mask[:stop]
    sample.token_data = {name: values[:stop] for name, values in sample.token_data.items()}
    if sample.reward is not None and sample.reward.token_values is not None:
        tokens = sample.reward.token_values[: stop - sample.num_prompt_tokens]
        sample.reward = RewardResult(
            sample.reward.value, sample.reward.components, tokens, step_ends=tokens.nonzero()[0]
        )


def _content(batch: TrainBatch) -> Any:
    """Everything in a batch, to compare it byte for byte."""
    tensors = {**batch.token_data, **{f"sequence/{name}": values for name, values in batch.sequence_data.items()}}
    tensors |= {"token_ids": batch.token_ids, "loss_mask": batch.loss_mask, "group_index": batch.group_index}
    return batch.sample_ids, {name: values.numpy().tobytes() for name, values in sorted(tensors.items())}
