"""The contract of a flow's call: it stores what its record declares, in the samples that it is given, and no more."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from chatlearn_core.exceptions import BackendError, ChatLearnError, FlowError
from chatlearn_core.plugins.import_string import resolve_import_string
from chatlearn_core.plugins.records import FlowMethodSpec, Kind
from chatlearn_core.types import Completion, RewardResult, Rollout, Sample, SamplingParams, pack_samples
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.child_python import ENGINES, assert_imports_none_of
from chatlearn_testing.suites.algorithm_roles import TableTrainer
from chatlearn_testing.suites.conformance_suite import ConformanceSuite, installed_plugins, nothing_changes
from chatlearn_testing.suites.flow_method_play import (
    FAILS,
    OTHER,
    OWN,
    FlowPart,
    FlowStage,
    Played,
    SampleFacts,
    build_model,
    with_record,
)

ROLE_KINDS = ("trainer", "generator", "reward", "environment", "function")
LOST = "the role under test was lost on purpose"
DATA_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
Expected = Callable[[Sequence[Sample], TableTrainer], Sequence[Mapping[str, Any]]]
"""``(samples, role)`` -> for each sample, name -> value of the data that the call must add."""


class FlowMethodConformance(ConformanceSuite):
    """Contract tests that every call of flows must pass.

    A subclass sets ``backend``, ``arguments`` if the call needs some, ``prepare`` if it needs data that other calls
    add, and ``expected`` to have its values compared. The call is made on the role ``own`` after
    ``generator.generate``; ``trainer``, ``reward`` and ``generator`` are other roles of the flow.
    """

    kind: ClassVar[Kind] = "flow_method"
    settable: ClassVar[frozenset[str]] = frozenset({"arguments", "prepare", "function", "sampling", "expected"})
    options_field: ClassVar[str | None] = "arguments"
    arguments: ClassVar[Mapping[str, Any]] = {}
    """Arguments of the call."""
    prepare: ClassVar[FlowPart | None] = None
    """``(samples, m)`` -> samples: calls of the flow before the one under test."""
    function: ClassVar[str | None] = None
    """For ``m.apply``: the import string of the function."""
    sampling: ClassVar[SamplingParams] = SamplingParams(max_tokens=7, temperature=0.7)
    """The run's sampling parameters."""
    expected: ClassVar[Expected | None] = None

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A model directory of the kit."""
        return build_model(tmp_path_factory.mktemp("flow") / "model")

    @pytest.fixture
    def stage(self, model: Path) -> FlowStage:
        """The call under test in a flow."""
        cls, record = type(self), self.record()
        registry = with_record(installed_plugins(), record)
        return FlowStage(record, registry, self.arguments, cls.prepare, self.function, self.sampling, model)

    def test_options_are_described_and_strict(self) -> None:
        """An unknown argument raises, so that no misspelled one is ignored: set ``ConfigDict(extra="forbid")``."""
        if self.record().role_kind == "function":
            not_applicable("a user's function has arguments of its own")
        with pytest.raises(ValueError, match="no_such_argument"):
            self.options_model()(**dict(self.arguments), no_such_argument=1)

    def test_the_record_is_consistent(self) -> None:
        """The name joins a kind of role and a method; the action is an async function; ``outputs`` are registered and
        of trainers; names in ``adds`` are distinct and valid; no argument is called ``name``, which flows use
        themselves.
        """
        record: FlowMethodSpec = self.record()
        assert record.role_kind in ROLE_KINDS, f"{record.name!r}: {record.role_kind!r} is no kind of role"
        assert record.method.isidentifier(), f"{record.name!r}: {record.method!r} cannot be called in a flow"
        assert inspect.iscoroutinefunction(self.build("action")), f"action {record.action!r} is no async function"
        assert "name" not in self.options_model().model_fields, "an argument is called 'name'; choose another name"
        known = installed_plugins().outputs
        unknown = [name for name in record.outputs if name not in known]
        assert not unknown, f"outputs: {unknown[0]!r} is registered by no installed plugin (chatlearn_outputs)"
        assert record.role_kind == "trainer" or not record.outputs, "outputs are of trainers"
        assert record.takes == "samples" or record.role_kind in ("generator", "environment"), (
            f"a {record.role_kind} makes no samples from examples"
        )
        if record.other_samples is not None:
            assert callable(resolve_import_string(record.other_samples)), f"{record.other_samples!r} is no function"
            assert record.outputs, "other_samples are those whose outputs are requested; the record has no outputs"
        names = [entry.format(name="role") for entry in record.adds]
        wrong = [name for name in names if not DATA_NAME.fullmatch(name)]
        assert not wrong, f"adds: {wrong[0]!r} cannot be a name of data"
        of_outputs = [] if record.other_samples else [f"role_{name}" for name in record.outputs]
        assert len({*names, *of_outputs}) == len(names) + len(of_outputs), f"adds {names} names data twice"

    def test_arguments_import_no_engine(self) -> None:
        """Importing the module of the arguments imports no engine: configurations are checked with it."""
        assert_imports_none_of(ENGINES, [self.record().arguments.partition(":")[0]], self.patience_s)

    def test_a_flow_can_make_the_call(self, stage: FlowStage) -> None:
        """The flow is traced, and an argument that the call does not have is refused by name."""
        [call] = [node for node in stage.graph().nodes if node.method.name == self.record().name]
        assert call.name
        if self.record().role_kind != "function":
            with pytest.raises(FlowError, match="no_such_argument"):
                stage.graph(no_such_argument=1)

    def test_samples_are_those_of_the_requests(self, stage: FlowStage) -> None:
        """A call that takes examples makes one sample of each request, with its id, group and prompt."""
        if self.record().takes == "samples":
            not_applicable("the record declares takes='samples'")
        for request in stage.play().requests:
            sample = request.filled
            assert (sample.id, sample.group_id) == (request.sample_id, request.group_id), f"{sample.id} of another"
            assert sample.prompt is request.prompt, f"{sample.id}: another prompt than that of its request"
            assert sample.turns, f"{sample.id}: it has no turn"
            wanted = request.prompt.token_ids
            assert np.array_equal(sample.token_ids[: len(wanted)], wanted), f"{sample.id}: the prompt is not kept"

    def test_stores_what_is_declared_and_nothing_else(self, stage: FlowStage) -> None:
        """Every sample gets the data of ``outputs`` and ``adds``. A call without ``changes`` leaves everything else as
        it was: tokens, masks, turns, earlier data, exclusions.
        """
        self._takes_samples()
        played = stage.play()
        [call] = played.calls
        declared = set(call.fields)
        assert played.before.keys() == played.after.keys(), "the call makes samples or loses them"
        for name, now in played.after.items():
            before = played.before[name]
            new = self._new(before, now)
            assert new <= declared, f"{name}: {sorted(new - declared)} is added; declare it in adds or outputs"
            if not self.record().changes:
                assert declared == new, f"{name}: {sorted(declared - new)} is declared and not added"
                _assert_unchanged(name, before, now)
            elif now.exclusion is None:
                assert declared <= new | before.names, f"{name}: {sorted(declared - new)} is declared and not added"
            for field in new:
                value = now.value(field)
                assert value is not None, f"{name}: {field} has no value"
                assert bool(np.isfinite(value).all()), f"{name}: {field} is {value}"
                if field in now.token_data:
                    assert len(value) == len(now.token_ids), f"{name}: {field} is not one entry per token"

    def test_data_are_named_after_the_role_or_the_argument(self, stage: FlowStage) -> None:
        """The argument ``name`` of a call takes the role's place in names, so that a flow may call twice."""
        self._takes_samples()
        if not self._fields(stage):
            not_applicable("the call adds no data")
        played = stage.play(stage.graph(name="second"))
        wanted = set(played.calls[0].fields)
        assert all("second" in field for field in wanted), f"fields {sorted(wanted)} do not have the name"
        for name, now in played.after.items():
            new = self._new(played.before[name], now)
            assert new == wanted, f"{name}: {sorted(new)} is added under the name 'second', not {sorted(wanted)}"

    def test_two_roles_do_not_mix(self, stage: FlowStage) -> None:
        """Calls on two roles add the data of each role, as if the other call was not made."""
        self._takes_samples()
        if self.record().changes or not self._fields(stage) or self.record().role_kind == "function":
            not_applicable("the call adds no data beside another one's")
        if not all(OWN in field for field in self._fields(stage)):
            not_applicable("the data do not have the role's name")
        both = stage.play(stage.graph((OWN, OTHER))).after
        if self.record().role_kind == "trainer":
            [one, two] = [[node.fields for node in stage.graph((role,)).nodes][-1] for role in (OWN, OTHER)]
            same = [
                all(np.array_equal(now.value(a), now.value(b)) for now in both.values())
                for a, b in zip(one, two, strict=True)
            ]
            assert not any(same), "two roles with other weights have the same data"
        for role in (OWN, OTHER):
            alone = stage.play(stage.graph((role,)))
            for name, wanted in alone.after.items():
                for field in alone.calls[0].fields:
                    _assert_close(both[name].value(field), wanted.value(field), f"{name}: {field}, beside another call")

    def test_a_sample_without_tokens_is_passed_over(self, stage: FlowStage) -> None:
        """A sample whose generation failed stays excluded for that reason, and all others get their data."""
        self._takes_samples()
        played = stage.play(fails=FAILS)
        failed, before = played.after[FAILS], played.before[FAILS]
        assert failed.exclusion == before.exclusion, f"{FAILS}: excluded as {failed.exclusion!r}, not as before"
        assert failed.token_ids == before.token_ids, f"{FAILS}: tokens of a failed sample were changed"
        for name, now in played.after.items():
            if name != FAILS and now.exclusion is None and not self.record().changes:
                missing = set(played.calls[0].fields) - self._new(played.before[name], now)
                assert not missing, f"{name}: {sorted(missing)} is missing, after another sample failed"

    def test_when_samples_come_does_not_matter(self, stage: FlowStage) -> None:
        """With ``granularity="sample"`` or ``"group"``, a call on one sample, or group, after the other gives the same
        as one call on all: which samples are ready at the same time is chance. Otherwise declare
        ``granularity="batch"``.
        """
        granularity = self.record().granularity
        if granularity == "batch":
            not_applicable("the record declares granularity='batch'")
        whole = replace(self.record(), granularity="batch")
        at_once = replace(stage, record=whole, registry=with_record(installed_plugins(), whole))
        together, apart = at_once.play().after, stage.play(unit=granularity).after
        assert together.keys() == apart.keys(), f"{granularity} by {granularity}, there are other samples"
        for name, wanted in together.items():
            _assert_equal(name, apart[name], wanted, f"one {granularity} after the other")

    def test_the_same_samples_get_the_same(self, stage: FlowStage) -> None:
        """A call gives the same again, whatever was called in between: a resumed run makes it again."""
        first = stage.play().after
        stage.play(seed=1)
        again = stage.play().after
        for name, wanted in first.items():
            _assert_equal(name, again[name], wanted, "the second time")

    def test_samples_of_an_earlier_call_are_left_alone(self, stage: FlowStage) -> None:
        """A later call, on other samples, changes nothing of those that an earlier one was given."""
        played = stage.play()
        kept = played.after
        stage.play(seed=1)
        for name, now in played.after.items():
            _assert_equal(name, now, kept[name], "after a call on other samples")

    def test_outputs_are_those_of_the_role(self, stage: FlowStage) -> None:
        """The data of ``outputs`` are what the role computes for the sample's own tokens, at the run's temperature."""
        record: FlowMethodSpec = self.record()
        if not record.outputs or record.other_samples is not None or record.by_text:
            not_applicable("the record declares no outputs of the samples themselves")
        played = stage.play()
        [call] = played.calls
        role = played.roles.trainers[OWN]
        assert played.roles.seen, "the role was asked for nothing"
        request = played.roles.seen[0][1]
        for sample in played.samples:
            with torch.no_grad():
                found = role.outputs(pack_samples([sample]), request)
            for output, field in call.output_fields.items():
                wanted = found[output].float().numpy()
                stored = sample.token_data.get(field, sample.sequence_data.get(field))
                _assert_close(stored, wanted if field in sample.token_data else wanted[0], f"{sample.id}: {field}")
            assert request.temperature == self.arguments.get("temperature", self.sampling.temperature), (
                f"the role is asked at temperature {request.temperature}"
            )

    def test_the_role_gets_the_tokens_that_are_declared(self, stage: FlowStage) -> None:
        """A trainer role is asked for the outputs in ``outputs``, of the samples' tokens or of those that
        ``other_samples`` makes of them; only with ``by_text`` does it get tokens of its own.
        """
        record: FlowMethodSpec = self.record()
        if record.role_kind != "trainer":
            not_applicable("the call is not on a trainer")
        played = stage.play()
        asked = {name for _, request in played.roles.seen for name in request.names}
        if record.outputs:
            assert asked <= set(record.outputs), f"{sorted(asked)} is requested; outputs are {list(record.outputs)}"
        if record.by_text:
            not_applicable("the record declares by_text: the role has tokens of its own")
        tokens = {facts.token_ids for facts in played.before.values()}
        if record.other_samples is not None:
            others = self.build("other_samples")(played.samples, 64)
            tokens |= {tuple(map(int, sample.token_ids)) for sample in others}
        for batch, _ in played.roles.seen:
            bounds = batch.cu_seqlens.tolist()
            for start, stop in pairwise(bounds):
                found = tuple(batch.token_ids[start:stop].tolist())
                assert found in tokens, f"the role is given {found}: declare by_text or other_samples"

    def test_values_are_as_expected(self, stage: FlowStage) -> None:
        """The data of every sample have the values that ``expected`` gives."""
        expected = type(self).expected
        if expected is None:
            not_applicable("the suite sets no expected")
        played = stage.play()
        role = played.roles.trainers.get(OWN, played.roles.policy)
        for sample, wanted in zip(played.samples, expected(played.samples, role), strict=True):
            now = SampleFacts.of(sample)
            assert wanted, f"{sample.id}: expected names no data"
            for field, value in wanted.items():
                _assert_close(now.value(field), value, f"{sample.id}: {field}")

    def test_an_error_of_the_role_is_not_hidden(self, stage: FlowStage) -> None:
        """If the role fails, the call raises its error, or excludes the samples with a reason that has it; equal
        reasons are counted together, so they name no sample.
        """
        if self.record().role_kind == "function":
            not_applicable("a function has no role")
        self._assert_refused(stage, LOST, error=BackendError(LOST))

    def test_odd_values_are_refused(self, stage: FlowStage) -> None:
        """If the role returns numbers that are not finite, the call raises an error that names the role, or excludes
        the samples. Completions are checked on arrival; a call checks what it asks of a trainer (``check_outputs``).
        """
        if self.record().role_kind not in ("trainer", "reward"):
            not_applicable("completions are checked before a call gets them")
        self._assert_refused(stage, OWN if self.record().role_kind == "trainer" else "", change=_not_finite)

    def test_missing_outputs_are_refused(self, stage: FlowStage) -> None:
        """If a trainer returns too few rows, the call raises an error that names the role."""
        if self.record().role_kind != "trainer":
            not_applicable("the call is not on a trainer")
        self._assert_refused(stage, OWN, change=_too_few)

    def test_the_process_stays_as_it_was(self, stage: FlowStage, capfd: pytest.CaptureFixture[str]) -> None:
        """A call prints nothing, writes no file, and changes no state that the process shares, such as seeds."""
        graph = stage.graph()
        stage.play(graph)  # imports what it needs
        with nothing_changes(capfd):
            stage.play(graph)

    # Internal methods

    def _takes_samples(self) -> None:
        if self.record().takes == "examples":
            not_applicable("the record declares takes='examples'")

    def _call(self, stage: FlowStage) -> Any:
        return next(node for node in stage.graph().nodes[::-1] if node.method.name == self.record().name)

    def _fields(self, stage: FlowStage) -> tuple[str, ...]:
        fields: tuple[str, ...] = self._call(stage).fields
        return fields

    @staticmethod
    def _new(before: SampleFacts, now: SampleFacts) -> set[str]:
        """Names of data that a sample has got; data that were there and have other values count, too."""
        new = set(now.names - before.names)
        if now.reward is not None and now.reward != before.reward:
            new.add("reward")
        return new

    def _assert_refused(self, stage: FlowStage, names: str, **fault: Any) -> None:
        try:
            played: Played = stage.play(**fault)
        except ChatLearnError as error:
            if names not in str(error):
                raise AssertionError(f"the error does not name {names!r}: {error}") from error
            return
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} instead of an error of ChatLearn: {error}") from error
        reasons = set()
        for name, now in played.after.items():
            assert now.exclusion is not None, f"{name} is trained on, although the role failed"
            assert names in now.exclusion or names == OWN, f"{name}: the reason {now.exclusion!r} has not {names!r}"
            reasons.add(now.exclusion)
        assert len(reasons) == 1, f"reasons differ and would be counted apart: {sorted(reasons)[:3]}"


def _assert_unchanged(name: str, before: SampleFacts, now: SampleFacts) -> None:
    for field in ("token_ids", "loss_mask", "num_prompt_tokens", "num_turns", "unit_id", "exclusion"):
        one, other = getattr(now, field), getattr(before, field)
        assert one == other, f"{name}: {field} became {one!r:.120}; a call that changes samples declares changes"
    for field in before.names:
        found = now.value(field)
        assert found is not None, f"{name}: the earlier data {field!r} are gone"
        assert np.array_equal(found, before.value(field)), f"{name}: the earlier data {field!r} were changed"


def _assert_equal(name: str, now: SampleFacts, wanted: SampleFacts, when: str) -> None:
    """Equal tokens, and data that are equal but for rounding."""
    for field in ("token_ids", "loss_mask", "num_turns", "exclusion"):
        one, other = getattr(now, field), getattr(wanted, field)
        assert one == other, f"{name}: {when}, {field} is {one!r:.120} instead of {other!r:.120}"
    assert now.names == wanted.names, f"{name}: {when}, it has the data {sorted(now.names)}"
    for field in (*wanted.names, "reward"):
        _assert_close(now.value(field), wanted.value(field), f"{name}: {when}, {field}")


def _assert_close(found: Any, wanted: Any, what: str) -> None:
    assert (found is None) == (wanted is None), f"{what} is {found} instead of {wanted}"
    if wanted is None:
        return
    one, other = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert one.shape == other.shape, f"{what} has the shape {one.shape}, not {other.shape}"
    assert np.allclose(one, other, rtol=1e-5, atol=1e-6), f"{what} is {one} instead of {other}"


def _not_finite(value: Any) -> Any:
    """What a role returned, with every floating-point number NaN."""
    if isinstance(value, dict):
        return {
            name: torch.full_like(values, float("nan")) if values.is_floating_point() else values - 10**6
            for name, values in value.items()
        }
    if isinstance(value, list):
        return [RewardResult(float("nan")) for _ in value]
    assert isinstance(value, Completion | Rollout)
    return value


def _too_few(value: Any) -> Any:
    """What a trainer returned, without the last row."""
    return {name: values[:-1] for name, values in value.items()}
