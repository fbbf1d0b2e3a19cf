"""The contract of an aggregation: weights of a mini-batch's tokens that depend on what the mini-batch holds alone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor

from chatlearn_core.exceptions import UnfetchedError
from chatlearn_core.plugins.records import Kind
from chatlearn_core.protocols import Aggregation
from chatlearn_core.types import ArrayRef, TensorRef, TrainBatch, cumulative_lengths
from chatlearn_core.types.array_ref import fill
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.batches import make_batch, sequences
from chatlearn_testing.suites.conformance_suite import ConformanceSuite, nothing_changes

VOCAB = 50
GROUPS = (0, 0, 1, 1, 1, 2, 2)
"""Group of each sequence of ``make_batch``."""
LONG = 120_000
"""Tokens of a long sequence; those that are trained on are more than a half-precision number can count."""
TOLERANCE = 1e-5
"""Relative tolerance of weights: float32 sums of some tens of thousands of tokens."""
UNREAD = ("advantages", "generator_logprobs")
"""Token data that batches of a run have, whether or not an aggregation reads them."""
DrawData = Callable[[str, int, torch.Generator], Tensor]
"""``(name, count, generator)`` -> [count, ...] random values of the token data ``name``."""


@dataclass(slots=True, frozen=True)
class AggregationCase:
    """A small mini-batch and the weights that its tokens must get.

    Example: two sequences, of which two tokens and one token are trained on, and every token weighs the same:
    ``AggregationCase(masks=((0, 1, 1), (0, 1)), weights=((0, 1 / 3, 1 / 3), (0, 1 / 3)))``.
    """

    masks: Sequence[Sequence[int]]
    """One entry per sequence: 1 for each token that is trained on, otherwise 0; the first token is never trained on."""
    weights: Sequence[Sequence[float]]
    """One entry per sequence: the weight of each token."""
    groups: Sequence[int] = ()
    """Group of each sequence; by default each sequence has a group of its own."""
    token_ids: Sequence[Sequence[int]] = ()
    """By default zeros."""
    token_data: Mapping[str, Sequence[Sequence[Any]]] = field(default_factory=dict)
    """Name -> one entry per sequence: the values of each token."""

    def batch(self) -> TrainBatch:
        """The mini-batch."""
        lengths = [len(mask) for mask in self.masks]
        count, total = len(lengths), sum(lengths)
        return TrainBatch(
            sample_ids=tuple(f"sample-{i}" for i in range(count)),
            token_ids=_flat(self.token_ids).long() if self.token_ids else torch.zeros(total, dtype=torch.int64),
            cu_seqlens=cumulative_lengths(lengths),
            loss_mask=_flat(self.masks).bool(),
            unit_index=torch.arange(count),
            group_index=torch.as_tensor(list(self.groups or range(count)), dtype=torch.int64),
            token_data={name: _flat(rows) for name, rows in self.token_data.items()},
        )


class AggregationConformance(ConformanceSuite):
    """Contract tests that every aggregation must pass.

    A subclass sets ``backend``, ``options`` and ``cases``, and ``draw_data`` if the aggregation reads token data that
    are not numbers between 0 and 1, one for each token.
    """

    kind: ClassVar[Kind] = "aggregation"
    settable: ClassVar[frozenset[str]] = frozenset({"cases", "draw_data"})
    cases: ClassVar[Sequence[AggregationCase]]
    draw_data: ClassVar[DrawData | None] = None

    def test_cases_can_tell_right_from_wrong(self) -> None:
        """The cases have a mini-batch whose sequences differ in the number of tokens that are trained on, some of which
        are not: otherwise most aggregations give the same weights.
        """
        counts = [[sum(mask) for mask in case.masks] for case in self.cases]
        assert any(len(set(of_case)) > 1 for of_case in counts), (
            "set a case with sequences that differ in the number of tokens that are trained on"
        )
        assert any(0 in mask[1:] for case in self.cases for mask in case.masks), (
            "set a case with a token, other than a first one, that is not trained on"
        )

    def test_tokens_get_their_weights(self) -> None:
        """Every token of the cases has its expected weight."""
        for number, case in enumerate(self.cases):
            found, wanted = self._weights(case.batch()), _flat(case.weights).double()
            if not torch.allclose(found.double(), wanted, rtol=TOLERANCE, atol=1e-9):
                rows = [[round(w, 6) for w in row.tolist()] for row in sequences(case.batch(), found)]
                raise AssertionError(f"case {number}: the weights are {rows}, not {[list(w) for w in case.weights]}")

    def test_weights_are_numbers_one_for_each_token(self) -> None:
        """The result is a floating-point [T] tensor, finite, 0 where ``loss_mask`` is False, and a constant: it has no
        gradient. Sequences without a token to train on, mini-batches without one, and without a sequence are legal.
        """
        for name, batch in self._odd_batches():
            weights = self._function(batch)
            assert isinstance(weights, Tensor), f"{name}: the result is a {type(weights).__name__}, not a tensor"
            assert weights.shape == (batch.num_tokens,), f"{name}: {list(weights.shape)} for {batch.num_tokens} tokens"
            assert weights.is_floating_point(), f"{name}: the weights are {weights.dtype}"
            assert bool(torch.isfinite(weights).all()), f"{name}: weights are not finite"
            outside = weights[~batch.loss_mask]
            assert not bool(outside.any()), f"{name}: a token outside the loss mask has weight {outside.max():g}"
            assert not weights.requires_grad, f"{name}: the weights have a gradient; they are constants"

    def test_the_order_of_sequences_does_not_matter(self) -> None:
        """A token's weight stays the same when the mini-batch holds its sequences in another order: how they are packed
        depends on their lengths and on the number of ranks.
        """
        batch = self._batch()
        for order in ([6, 5, 4, 3, 2, 1, 0], [3, 0, 6, 2, 5, 1, 4]):
            self._assert_equal(batch, batch.select(order), "in another order")

    def test_names_and_numbers_of_groups_do_not_matter(self) -> None:
        """Ids of samples, numbers of groups and units are labels: other labels give the same weights."""
        batch = self._batch()
        relabelled = replace(
            batch,
            sample_ids=tuple(f"z{name}" for name in batch.sample_ids[::-1]),
            example_ids=tuple(f"y{name}" for name in batch.example_ids),
            group_index=17 - 5 * batch.group_index,
            unit_index=batch.unit_index * 3 + 4,
        )
        found, wanted = self._weights(relabelled), self._weights(batch)
        assert torch.allclose(found, wanted, rtol=TOLERANCE, atol=0), "other labels of groups change the weights"

    def test_groups_matter_only_if_declared(self) -> None:
        """With ``loss_unit="sequence"``, weights do not depend on which sequences belong to one prompt: the sequences
        of a prompt may then be in different mini-batches. Declare ``loss_unit="group"`` if they do.
        """
        if self.record().loss_unit == "group":
            not_applicable("the record declares loss_unit='group'")
        batch = self._batch()
        for groups in ([0] * 7, list(range(7)), [0, 1, 0, 1, 0, 1, 0]):
            other = replace(batch, group_index=torch.tensor(groups))
            found, wanted = self._weights(other), self._weights(batch)
            assert torch.allclose(found, wanted, rtol=TOLERANCE, atol=0), (
                f"weights change if the sequences belong to the groups {groups} instead of {list(GROUPS)}; the record "
                "must declare loss_unit='group'"
            )

    def test_only_declared_fields_are_read(self) -> None:
        """The function reads the values of ``loss_mask`` and of the fields in ``reads``; all others are references, as
        in a run with several processes.
        """
        reads = self.record().reads
        batch = self._batch()
        given = replace(
            batch,
            token_ids=batch.token_ids if "token_ids" in reads else _reference(batch, "token_ids", batch.token_ids),
            token_data={
                name: values if name in reads else _reference(batch, name, values)
                for name, values in batch.token_data.items()
            },
        )
        try:
            found = self._weights(given)
        except (UnfetchedError, TypeError) as error:
            raise AssertionError(f"a field that reads={sorted(reads)} does not declare is read: {error}") from error
        assert torch.allclose(found, self._weights(batch), rtol=TOLERANCE, atol=0), "references change the weights"

    def test_weights_depend_on_the_mini_batch_alone(self) -> None:
        """The same mini-batch has the same weights whatever was weighed before and whatever the random state is."""
        batch, other = self._batch(), self._batch(seed=1)
        wanted = self._weights(batch)
        state = torch.get_rng_state()
        try:
            torch.manual_seed(11)
            self._weights(other)
            assert torch.equal(self._weights(batch), wanted), "the weights changed after another mini-batch"
        finally:
            torch.set_rng_state(state)

    def test_a_batch_is_read_only(self) -> None:
        """The function changes neither the batch nor the options, and its result shares no memory with the batch."""
        batch, options = self._batch(), self.make_options()
        kept, kept_options = copy.deepcopy(batch), options.model_copy(deep=True)
        weights = self.build("function")(batch, options)
        weights.fill_(-7.0)
        for name in ("token_ids", "cu_seqlens", "loss_mask", "unit_index", "group_index", "num_prompt_tokens"):
            assert torch.equal(getattr(batch, name), getattr(kept, name)), f"{name} was changed"
        for kind in ("token_data", "sequence_data"):
            mine, before = getattr(batch, kind), getattr(kept, kind)
            assert mine.keys() == before.keys(), f"{kind} has {sorted(mine)}; it had {sorted(before)}"
            changed = [name for name in before if not torch.equal(mine[name], before[name])]
            assert not changed, f"{kind} {changed[0]!r} was changed"
        assert options == kept_options, f"the options were changed to {options}"

    def test_micro_batches_add_up(self) -> None:
        """The sums of micro-batches add up to the sum of the mini-batch, in a process to which the loss was sent. The
        core checks the weights on the way.
        """
        batch = self._batch()
        aggregation = pickle.loads(pickle.dumps(self._aggregation()))
        losses = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        weighed = replace(batch, token_data={"loss_weight": aggregation(batch), "loss": losses})
        whole = (weighed.token_data["loss_weight"] * losses).sum()
        for parts in ([[0, 1, 2], [3, 4, 5, 6]], [[6], [1, 3], [0, 2, 4, 5]], [[i] for i in range(7)]):
            made = [weighed.select(part).token_data for part in parts]
            total = torch.stack([(part["loss_weight"] * part["loss"]).sum() for part in made]).sum()
            assert torch.allclose(total, whole, rtol=1e-9), f"micro-batches {parts} add up to {total}, not {whole}"

    def test_long_sequences_are_weighed(self) -> None:
        """Weights of more tokens than a half-precision number can count are finite, not all 0, and the same in another
        order of the sequences.
        """
        batch = self._made((3, LONG, 5), (0, 1, 2), seed=2)
        weights = self._weights(batch)
        assert bool(torch.isfinite(weights).all()), f"weights of {LONG} tokens are not finite"
        if bool(self._weights(self._batch()).any()):
            assert bool(weights.any()), f"all weights are 0 in a mini-batch of {LONG} tokens"
        self._assert_equal(batch, batch.select([2, 1, 0]), f"with {LONG} tokens and another order")

    def test_the_process_stays_as_it_was(self, capfd: pytest.CaptureFixture[str]) -> None:
        """Weighing prints nothing, writes no file, and changes no state that the process shares, such as seeds."""
        batch, function, options = self._batch(), self.build("function"), self.make_options()
        with nothing_changes(capfd):
            function(batch, options)

    # Internal methods

    def _aggregation(self) -> Aggregation:
        record = self.record()
        return Aggregation(record.name, self.build("function"), self.make_options(), record.loss_unit, record.reads)

    def _function(self, batch: TrainBatch) -> Any:
        return self.build("function")(batch, self.make_options())

    def _weights(self, batch: TrainBatch) -> Tensor:
        weights: Tensor = self._function(batch)
        return weights

    def _batch(self, seed: int = 0) -> TrainBatch:
        """A random mini-batch of three groups, with the token data that the record reads."""
        return self._with_data(replace(make_batch(VOCAB, seed=seed), group_index=torch.tensor(GROUPS)), seed)

    def _made(self, lengths: Sequence[int], groups: Sequence[int], seed: int) -> TrainBatch:
        batch = replace(make_batch(VOCAB, lengths, seed), group_index=torch.tensor(list(groups), dtype=torch.int64))
        return self._with_data(batch, seed)

    def _with_data(self, batch: TrainBatch, seed: int) -> TrainBatch:
        draw = type(self).draw_data or _between_0_and_1
        names: Collection[str] = {*UNREAD, *self.record().reads} - {"token_ids", "loss_mask"}
        generator = torch.Generator().manual_seed(100 + seed)
        drawn = {
            name: (draw if name in self.record().reads else _between_0_and_1)(name, batch.num_tokens, generator)
            for name in sorted(names)
        }
        return replace(batch, token_data=drawn)

    def _odd_batches(self) -> Iterator[tuple[str, TrainBatch]]:
        batch = self._batch()
        yield "a mini-batch", batch
        yield "an empty mini-batch", batch.select([])
        yield "one sequence", batch.select([4])
        yield "a sequence of one token", batch.select([2])
        untrained = batch.loss_mask & (batch.sequence_index != 1) & (batch.sequence_index != 4)
        yield "sequences that are not trained on", replace(batch, loss_mask=untrained)
        yield "nothing to train on", replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
        first = torch.zeros_like(batch.loss_mask)
        first[batch.cu_seqlens[:-1].long()] = True
        yield "everything to train on", replace(batch, loss_mask=~first)

    def _assert_equal(self, batch: TrainBatch, other: TrainBatch, what: str) -> None:
        """The sequences of both batches have the same weights."""
        rows = [dict(zip(one.sample_ids, sequences(one, self._weights(one)), strict=True)) for one in (batch, other)]
        for name, wanted in rows[0].items():
            found = rows[1][name]
            assert torch.allclose(found, wanted, rtol=TOLERANCE, atol=0), (
                f"{what}, the weights of {name!r} are {found.tolist()[:8]} instead of {wanted.tolist()[:8]}"
            )


def _flat(rows: Sequence[Sequence[Any]]) -> Tensor:
    """The entries of all sequences, one after another; numbers with a fraction are float32."""
    if not rows:
        return torch.zeros(0)
    return torch.cat([torch.as_tensor(row if len(row) else torch.zeros(0)) for row in rows])


def _between_0_and_1(name: str, count: int, generator: torch.Generator) -> Tensor:
    return torch.rand(count, generator=generator)


def _reference(batch: TrainBatch, name: str, values: Tensor) -> Tensor:
    """A reference to per-token values, which has their shape and no values."""
    pieces: list[Any] = [
        ArrayRef([fill(0.0, len(rows))], tuple(rows.shape[1:]), rows.numpy().dtype, owner, name)
        for owner, rows in zip(batch.sample_ids, sequences(batch, values), strict=True)
    ]
    return cast(Tensor, TensorRef(pieces))
