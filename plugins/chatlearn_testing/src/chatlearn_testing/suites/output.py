"""The contract of an output: its record says what trainers return, and the core refuses everything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor

from chatlearn_core.exceptions import ContractError
from chatlearn_core.plugins.records import FlowMethodSpec, Kind, OutputSpec, PluginRecord, TrainerSpec
from chatlearn_core.plugins.validation import VOCABULARIES
from chatlearn_core.runtime.boundary import Origin
from chatlearn_core.runtime.outputs import check_outputs, row_shape
from chatlearn_core.types import OutputRequest, TrainBatch
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.batches import make_batch, sequences
from chatlearn_testing.suites.algorithm_roles import VOCAB, TableTrainer, keyed_generator
from chatlearn_testing.suites.conformance_suite import ConformanceSuite, installed_plugins, nothing_changes

NUM_IDS = 3
"""Entries of each token in token data that an output reads."""
SIZE = 4
"""Size that a request's argument gives, unless the suite sets another."""
ROLE = Origin("judge", "trainer 'conformance'")
BEYOND = 0.5
"""How far a number is moved beyond a bound: more than rounding does."""
Fault = Literal[
    "missing",
    "no tensor",
    "another type",
    "another integer type",
    "too few rows",
    "a further dimension",
    "rows of another size",
    "NaN",
    "infinity",
    "below the bound",
    "above the bound",
]
FAULTS: tuple[Fault, ...] = Fault.__args__  # type: ignore[attr-defined]  # typing does not type it
Compute = Callable[[TrainBatch, OutputRequest, Tensor], Tensor]
"""``(batch, request, logits [T, V])`` -> the values, computed from the logits of each token's distribution."""
PerToken = Callable[[str, int, torch.Generator], Tensor]
"""``(name, count, generator)`` -> [count, ...] values of the token data that an output reads."""


class OutputConformance(ConformanceSuite):
    """Contract tests that every output must pass.

    A subclass sets ``backend``, and ``compute`` if the values follow from logits: a plain implementation, which the
    record is compared with. Without it, the kit takes numbers within the record's bounds. ``arguments`` are those of a
    request; ``draw_data`` gives token data that the output reads, by default token ids.
    """

    kind: ClassVar[Kind] = "output"
    settable: ClassVar[frozenset[str]] = frozenset({"compute", "arguments", "draw_data"})
    options_field: ClassVar[str | None] = None
    compute: ClassVar[Compute | None] = None
    arguments: ClassVar[Mapping[str, Any]] = {}
    draw_data: ClassVar[PerToken | None] = None

    def test_the_record_is_consistent(self) -> None:
        """Every field has a value that the core knows: sizes, names of arguments, bounds in order, a known head; the
        name can be part of a name of data. ``masked`` is about tokens, and what is read from the batch is an argument.
        """
        spec = self._spec()
        assert spec.name.isidentifier(), f"{spec.name!r} cannot be part of a name of data: use letters, digits and '_'"
        assert spec.summary, "the record has no summary"
        assert spec.per in ("token", "sequence"), f"per is {spec.per!r}"
        assert spec.dtype in ("float", "int"), f"dtype is {spec.dtype!r}"
        assert spec.head is None or spec.head in VOCABULARIES["heads"], f"head is {spec.head!r}"
        assert isinstance(spec.shape, tuple), f"shape is {spec.shape!r}, not a tuple"
        for size in spec.shape:
            is_size = size is None or (isinstance(size, int) and not isinstance(size, bool) and size > 0)
            is_name = isinstance(size, str) and size.isidentifier()
            assert is_size or is_name, f"shape has {size!r}: a size above 0, None, or the name of an argument"
        assert isinstance(spec.from_batch, tuple), f"from_batch is {spec.from_batch!r}, not a tuple of names"
        wrong = [name for name in spec.from_batch if not (isinstance(name, str) and name.isidentifier())]
        assert not wrong, f"from_batch has {wrong[:1]}; it names arguments of the request"
        assert spec.masked or spec.per == "token", "masked=False is about outputs per token"
        bounds = [bound for bound in (spec.at_least, spec.at_most) if bound is not None]
        assert all(math.isfinite(bound) for bound in bounds), f"bounds {bounds}: leave out those that are not finite"
        assert bounds == sorted(bounds), f"at_least {spec.at_least} is above at_most {spec.at_most}"

    def test_values_pass(self) -> None:
        """The values of a trainer pass the core's checks: in a mini-batch, of one sequence, and of none."""
        for name, batch in self._batches():
            self._check(self._values(batch), batch, name)

    def test_values_do_not_depend_on_packing(self) -> None:
        """A sequence has the same values whatever is packed with it."""
        batch = self._batch()
        whole = self._values(batch)
        for index in range(batch.num_sequences):
            part = batch.select([index])
            found = self._values(part)
            wanted = whole[index : index + 1] if self._spec().per == "sequence" else sequences(batch, whole)[index]
            if not torch.allclose(found.double(), wanted.double(), rtol=1e-5, atol=1e-6):
                raise AssertionError(f"sequence {index} alone has {found.tolist()} instead of {wanted.tolist()}")

    def test_masked_is_true(self) -> None:
        """With ``masked``, values are 0 where ``loss_mask`` is False; without, they are computed at every token."""
        spec = self._spec()
        if spec.per == "sequence":
            not_applicable("the record declares per='sequence'")
        batch = self._batch()
        rows = self._values(batch)[~batch.loss_mask].double().flatten(start_dim=1 if spec.shape else 0)
        if spec.masked:
            assert not bool(rows.any()), f"values outside the loss mask are {rows[:3].tolist()}, not 0"
        else:
            assert bool(rows.any()), "all values outside the loss mask are 0; declare masked=True"

    def test_the_bounds_are_those_of_the_values(self) -> None:
        """``compute`` gives numbers on the allowed side of each bound, not beyond it by rounding, and none is NaN."""
        if type(self).compute is None:
            not_applicable("the suite sets no compute")
        spec, batch = self._spec(), self._batch()
        values = self._values(batch).double()
        if spec.per == "token" and spec.masked:
            values = values[batch.loss_mask]
        assert bool(torch.isfinite(values).all()), "compute gives numbers that are not finite"
        if spec.at_least is not None:
            assert float(values.min()) >= spec.at_least - 1e-6, f"{float(values.min())} is below {spec.at_least}"
        if spec.at_most is not None:
            assert float(values.max()) <= spec.at_most + 1e-6, f"{float(values.max())} is above {spec.at_most}"

    @pytest.mark.parametrize("fault", FAULTS)
    def test_faults_are_refused(self, fault: Fault) -> None:
        """A trainer that returns something else is refused, with a message that names role, output and, for a number,
        the sample: a bound or a shape that the record leaves out is not checked.
        """
        spec, batch = self._spec(), self._batch()
        values = self._values(batch)
        broken = self._broken(fault, values, batch)
        given: dict[str, Any] = {} if broken is None else {spec.name: broken}
        with pytest.raises(ContractError) as caught:
            check_outputs(given, batch, self._request(), ROLE, {spec.name: spec})
        reason = str(caught.value)
        assert ROLE.role in reason, f"the message does not name the role: {reason}"
        assert repr(spec.name) in reason, f"the message does not name the output: {reason}"
        if fault in ("NaN", "infinity", "below the bound", "above the bound"):
            assert any(repr(name) in reason for name in batch.sample_ids), f"the message names no sample: {reason}"

    def test_what_is_masked_may_hold_anything(self) -> None:
        """Numbers outside the loss mask are not judged: with ``masked``, no loss reads them."""
        spec, batch = self._spec(), self._batch()
        if spec.per == "sequence" or not spec.masked or spec.dtype != "float":
            not_applicable("the record declares values that are all read")
        values = self._values(batch).clone()
        values[~batch.loss_mask] = float("nan")
        self._check(values, batch, "with NaN outside the loss mask")

    def test_arguments_of_a_request_are_asked_for(self) -> None:
        """A request without an argument that the record names is refused, by the argument's name, and so is one that
        names token data which the batch does not have.
        """
        spec, batch = self._spec(), self._batch()
        named = [size for size in spec.shape if isinstance(size, str)]
        if not named:
            not_applicable("the record's shape names no argument")
        values, request = self._values(batch), self._request()
        for name in named:
            fewer = replace(request, arguments={k: v for k, v in request.arguments.items() if k != name})
            with pytest.raises(ContractError, match=name):
                check_outputs({spec.name: values}, batch, fewer, ROLE, {spec.name: spec})
            if name in spec.from_batch:
                other = replace(request, arguments={**request.arguments, name: "no_such_data"})
                with pytest.raises(ContractError, match="no_such_data"):
                    check_outputs({spec.name: values}, batch, other, ROLE, {spec.name: spec})

    def test_flows_that_ask_for_it_can_name_its_arguments(self) -> None:
        """Every installed flow method with this output has an argument for each that the record names."""
        spec = self._spec()
        named = {*spec.from_batch, *(size for size in spec.shape if isinstance(size, str))}
        methods = [record for record in self._installed("flow_method") if isinstance(record, FlowMethodSpec)]
        asking = [record for record in methods if spec.name in record.outputs]
        if not asking:
            not_applicable("no installed flow method asks for it")
        for record in asking:
            fields = installed_plugins().load_options(record, "arguments").model_fields
            missing = sorted(named - fields.keys())
            assert not missing, f"the flow method {record.name!r} has no argument {missing[0]!r}"

    def test_trainers_that_compute_it_have_its_head(self) -> None:
        """Every installed trainer that lists the output can have the head that it needs."""
        spec = self._spec()
        trainers = [record for record in self._installed("trainer") if isinstance(record, TrainerSpec)]
        computing = [record for record in trainers if spec.name in record.outputs]
        if not computing:
            not_applicable("no installed trainer lists it")
        for record in computing:
            assert spec.head is None or spec.head in record.heads, (
                f"trainer {record.name!r} computes it and has the heads {', '.join(sorted(record.heads))}, "
                f"not {spec.head!r}"
            )

    def test_the_process_stays_as_it_was(self, capfd: pytest.CaptureFixture[str]) -> None:
        """Computing prints nothing, writes no file, and changes no state that the process shares, such as seeds."""
        batch = self._batch()
        with nothing_changes(capfd):
            self._values(batch)

    # Internal methods

    def _spec(self) -> OutputSpec:
        spec: OutputSpec = self.record()
        return spec

    @staticmethod
    def _installed(kind: Kind) -> tuple[PluginRecord, ...]:
        return installed_plugins().records(kind)

    def _request(self) -> OutputRequest:
        spec = self._spec()
        sizes = {size: SIZE for size in spec.shape if isinstance(size, str)}
        names = {name: f"given_{name}" for name in spec.from_batch}
        return OutputRequest(frozenset({spec.name}), 0.7, {**sizes, **names, **self.arguments})

    def _batch(self) -> TrainBatch:
        batch, draw = make_batch(VOCAB), type(self).draw_data or _ids
        given = self._request().arguments
        data = {
            str(given[name]): draw(name, batch.num_tokens, torch.Generator().manual_seed(7))
            for name in self._spec().from_batch
        }
        return replace(batch, token_data={**batch.token_data, **data})

    def _batches(self) -> Iterator[tuple[str, TrainBatch]]:
        batch = self._batch()
        yield "in a mini-batch", batch
        yield "of one sequence", batch.select([3])
        yield "of one token", batch.select([2])
        yield "of no sequence", batch.select([])
        yield "with nothing to train on", replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))

    def _values(self, batch: TrainBatch) -> Tensor:
        """The values that a trainer would return."""
        spec, request, compute = self._spec(), self._request(), type(self).compute
        if compute is not None:
            return compute(batch, request, _logits(batch))
        if spec.dtype == "int" and spec.name not in ("topk_ids",):
            return self._whole_numbers(batch, request)
        with torch.no_grad():
            return TableTrainer("judge", {spec.name: spec}).outputs(batch, request)[spec.name]

    def _whole_numbers(self, batch: TrainBatch, request: OutputRequest) -> Tensor:
        """Whole numbers within the bounds, 0 where masked; the same for equal tokens."""
        spec = self._spec()
        row = [size or SIZE for size in row_shape(spec, batch, request)]
        low = math.ceil(spec.at_least) if spec.at_least is not None else -9
        high = math.floor(spec.at_most) if spec.at_most is not None else low + 20
        table = torch.randint(low, high + 1, (VOCAB, *row), generator=keyed_generator("whole", spec.name))
        if spec.per == "sequence":
            return table[batch.token_ids[batch.cu_seqlens[:-1].long()]]
        values = table[batch.token_ids]
        return values * batch.loss_mask.view(-1, *[1] * len(row)) if spec.masked else values

    def _check(self, values: Tensor, batch: TrainBatch, what: str) -> None:
        spec = self._spec()
        try:
            check_outputs({spec.name: values}, batch, self._request(), ROLE, {spec.name: spec})
        except ContractError as error:
            raise AssertionError(f"{what}, the values of a trainer are refused: {error}") from error

    def _broken(self, fault: Fault, values: Tensor, batch: TrainBatch) -> Any:
        """The values with one fault; None: without the output."""
        spec = self._spec()
        if fault == "missing":
            return None
        if fault == "no tensor":
            return values.tolist()
        if fault == "another type":
            return values.double() if spec.dtype == "int" else values.long()
        if fault == "another integer type":
            return values.to(torch.int32)
        if fault == "too few rows":
            return values[:-1]
        if fault == "a further dimension":
            return values[..., None]
        if fault == "rows of another size":
            if not spec.shape or spec.shape[-1] is None:
                not_applicable("the record declares no size of rows")
            return torch.cat([values, values[..., :1]], -1)
        if fault in ("NaN", "infinity") and spec.dtype == "int":
            not_applicable("the record declares dtype='int'")
        bound = {"below the bound": spec.at_least, "above the bound": spec.at_most}.get(fault, 0.0)
        if bound is None:
            not_applicable(f"the record declares no {'at_least' if fault.startswith('below') else 'at_most'}")
        numbers = {"NaN": math.nan, "infinity": math.inf}
        beyond = BEYOND if spec.dtype == "float" else 1
        number = numbers.get(fault, bound - beyond if fault.startswith("below") else bound + beyond)
        changed = values.clone()
        row = 1 if spec.per == "sequence" else int(batch.loss_mask.nonzero()[3])
        changed[row] = number
        return changed


def _logits(batch: TrainBatch) -> Tensor:
    """[T, V] logits of the distribution that each token is from: a function of the token before it."""
    before = batch.token_ids.roll(1)
    starts = batch.cu_seqlens[:-1].long()
    before[starts] = batch.token_ids[starts]
    return torch.randn(VOCAB, VOCAB, generator=keyed_generator("judge", "logits"))[before]


def _ids(name: str, count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(VOCAB, (count, NUM_IDS), generator=generator)
