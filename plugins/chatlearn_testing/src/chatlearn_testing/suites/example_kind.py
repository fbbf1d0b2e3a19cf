"""The contract of a kind of examples: rows become examples, and examples become samples of each draw."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, ClassVar

import numpy as np
import pytest

from chatlearn_core.data import ExampleKind, RawExample, RowRenderer
from chatlearn_core.exceptions import DataError
from chatlearn_core.plugins.records import Kind
from chatlearn_core.types import Example, ExampleDraw, Prompt, Sample, pack_samples
from chatlearn_testing.fakes.renderer import CharacterRenderer
from chatlearn_testing.fakes.tokenizer import EOS
from chatlearn_testing.suites.conformance_suite import ConformanceSuite, nothing_changes

ROW_ID = "rows/7"
SOURCE = "conformance"
ODD: Mapping[str, Callable[[RawExample], RawExample]] = {
    "no completion": lambda raw: replace(raw, completion=None),
    "an empty completion": lambda raw: replace(raw, completion=""),
    "a completion without a turn of the assistant": lambda raw: replace(
        raw, completion=[{"role": "user", "content": "And?"}]
    ),
    "no completions": lambda raw: replace(raw, completions=(), ranks=(), labels=()),
    "an empty one among the completions": lambda raw: replace(raw, completions=("", *raw.completions[1:])),
    "more completions than verdicts": lambda raw: replace(raw, completions=(*raw.completions, "more")),
    "no ranks": lambda raw: replace(raw, ranks=()),
    "ranks that are not finite": lambda raw: replace(raw, ranks=(math.nan, *raw.ranks[1:])),
    "ranks that are texts": lambda raw: replace(raw, ranks=("high",) * len(raw.completions)),  # type: ignore[arg-type]  # what a careless format gives
    "equal ranks": lambda raw: replace(raw, ranks=(1.0,) * len(raw.completions), labels=()),
    "no labels": lambda raw: replace(raw, labels=()),
    "both ranks and labels": lambda raw: replace(
        raw, ranks=tuple(map(float, range(len(raw.completions)))), labels=(True,) * len(raw.completions)
    ),
    "an empty prompt": lambda raw: replace(raw, prompt=""),
    "no messages": lambda raw: replace(raw, prompt=[]),
    "no ground truth": lambda raw: replace(raw, ground_truth=None),
    "no columns": lambda raw: replace(raw, columns={}),
    "columns without values": lambda raw: replace(raw, columns=dict.fromkeys(raw.columns)),
    "columns that are lists": lambda raw: replace(raw, columns={name: [1, None] for name in raw.columns}),
    "columns that are texts": lambda raw: replace(raw, columns=dict.fromkeys(raw.columns, "one of two")),
    "columns that are not finite": lambda raw: replace(raw, columns=dict.fromkeys(raw.columns, math.nan)),
    "columns that are infinite": lambda raw: replace(raw, columns=dict.fromkeys(raw.columns, math.inf)),
}


@dataclass(slots=True, frozen=True)
class ExampleKindCase:
    """What a dataset format made of one row, and what its samples must train on.

    Example: ``ExampleKindCase(RawExample("2+2?", completion="4"), trained=("4",))``.
    """

    raw: RawExample
    trained: Sequence[str] | None
    """One text per sample, in order: the tokens in its loss mask, without ends of turns. Empty: a generator makes the
    samples. None: the row cannot be used and must raise a ``DataError``."""
    sequence_data: Sequence[Mapping[str, float]] = ()
    """The numbers that each sample has; empty: none has any."""
    one_unit: bool = False
    """Whether the samples of a draw stay together in a mini-batch, on one rank (``Sample.unit_id``)."""


@dataclass(slots=True, frozen=True)
class KitFormat:
    """The part of a ``DatasetFormat`` that kinds of examples use."""

    answer_columns: tuple[str, ...] = ("answer",)
    completion_columns: tuple[str, ...] = ("completion",)
    answer_required: bool = True

    def parse(self, row: Mapping[str, Any]) -> RawExample:
        """No row comes from a file here."""
        raise DataError("the suite makes no rows of files")


class ExampleKindConformance(ConformanceSuite):
    """Contract tests that every kind of examples must pass.

    A subclass sets ``backend`` and ``cases``: at least one row that can be used and one that cannot. Rows are rendered
    with one token per character.
    """

    kind: ClassVar[Kind] = "example_kind"
    settable: ClassVar[frozenset[str]] = frozenset({"cases"})
    options_field: ClassVar[str | None] = None
    cases: ClassVar[Sequence[ExampleKindCase]]

    def test_is_a_kind_of_examples(self) -> None:
        """The factory takes no arguments, and the object has the methods of ``ExampleKind``."""
        kind = self._kind()
        missing = [name for name in ("build", "samples") if not callable(getattr(kind, name, None))]
        assert not missing, f"a method of chatlearn_core.data.ExampleKind is missing: {', '.join(missing)}"

    def test_cases_hold_good_and_bad_rows(self) -> None:
        """The cases can tell a kind that takes everything, or nothing, from one that works."""
        assert self._good(), "set a case with the texts that its samples train on, empty if a generator makes them"
        assert any(case.trained is None for case in self.cases), "set a case whose row is bad (trained=None)"

    def test_rows_become_their_samples(self) -> None:
        """The samples of every good row train on the expected texts, have the expected numbers, and are of one unit if
        they are compared with each other.
        """
        for case in self._good():
            samples = self._samples(case)
            texts = tuple(_trained_text(sample) for sample in samples)
            assert texts == tuple(case.trained or ()), f"{case.raw}: the samples train on {texts}, not {case.trained}"
            wanted = [dict(numbers) for numbers in case.sequence_data] or [{} for _ in samples]
            found = [dict(sample.sequence_data) for sample in samples]
            assert found == wanted, f"{case.raw}: sequence_data is {found}, not {wanted}"
            units = len({sample.unit_id for sample in samples})
            expected = min(1, len(samples)) if case.one_unit else len(samples)
            assert units == expected, f"{case.raw}: {len(samples)} samples in {units} units (unit_id), not {expected}"

    def test_a_bad_row_is_an_error_with_a_reason(self) -> None:
        """A bad row raises a ``DataError`` with the reason alone: the pipeline adds file and line."""
        for case in self.cases:
            if case.trained is None:
                with pytest.raises(DataError) as caught:
                    self._build(case.raw)
                reason = str(caught.value)
                assert len(reason) > 8, f"{case.raw}: the reason is {reason!r}; say what is wrong"
                assert ROW_ID not in reason, f"{reason!r} names the row; the pipeline adds its place"

    def test_examples_are_well_formed(self) -> None:
        """An example has the row's id, prompt, source, ground truth and columns, and the length of its longest
        sequence: ``data.max_prompt_tokens`` and ``model.max_length`` are compared with it.
        """
        for case in self._good():
            example = self._build(case.raw)
            prompt = example.prompt
            assert isinstance(prompt, Prompt), f"{case.raw}: prompt is a {type(prompt).__name__}"
            assert (example.id, prompt.id) == (ROW_ID, ROW_ID), f"{case.raw}: ids {example.id!r} and {prompt.id!r}"
            assert prompt.data_source == SOURCE, f"{case.raw}: data_source is {prompt.data_source!r}, not {SOURCE!r}"
            assert prompt.ground_truth == case.raw.ground_truth, f"{case.raw}: the prompt lost the ground truth"
            assert dict(prompt.columns) == dict(case.raw.columns), f"{case.raw}: the prompt lost columns"
            shown = CharacterRenderer().prompt(case.raw.prompt)
            if not case.raw.imitates_prompt:
                assert prompt.text == shown.text, f"{case.raw}: the prompt is {prompt.text!r}, not {shown.text!r}"
                assert np.array_equal(prompt.token_ids, shown.token_ids), f"{case.raw}: other tokens than its text's"
            longest = max((len(sample.token_ids) for sample in self._samples(case)), default=len(prompt.token_ids))
            assert example.num_tokens == longest, f"{case.raw}: num_tokens is {example.num_tokens}, not {longest}"

    def test_content_tells_examples_apart(self) -> None:
        """``content`` covers all that an example holds besides id and prompt tokens: two that give other samples
        differ, and the same row has the same content. A checkpoint notices changed data by it.
        """
        good = [case for case in self._good() if case.trained]
        for case in self._good():
            content = _content(self._build(case.raw))
            assert all(isinstance(part, bytes) for part in content), f"{case.raw}: content yields {content!r:.80}"
            assert content == _content(self._build(copy.deepcopy(case.raw))), f"{case.raw}: its content changes"
        for one, other in combinations(good, 2):
            if _facts(self._samples(one)) != _facts(self._samples(other)):
                keys = [
                    (example.prompt.token_ids.tobytes(), b"".join(_content(example)))
                    for example in (self._build(one.raw), self._build(other.raw))
                ]
                assert keys[0] != keys[1], f"content is equal for {one.raw} and {other.raw}, whose samples differ"

    def test_samples_are_those_of_the_draw(self) -> None:
        """Samples have the draw's ids in order, its group and its prompt, begin with the prompt's tokens, and have no
        turn of a policy, reward or exclusion.
        """
        for case in self._good():
            example = self._build(case.raw)
            for number in (0, 3, "eval"):
                draw = ExampleDraw(example, number, f"key of {number}")
                samples = self._kind().samples(draw)
                assert isinstance(samples, list), f"samples returned a {type(samples).__name__}, not a list"
                for index, sample in enumerate(samples):
                    assert sample.id == draw.sample_id(index), f"{sample.id!r} is not {draw.sample_id(index)!r}"
                    assert sample.group_id == draw.group_id, f"{sample.id}: group {sample.group_id!r}"
                    assert sample.example_id == example.id, f"{sample.id}: example_id {sample.example_id!r}"
                    assert sample.prompt is example.prompt, f"{sample.id}: another prompt than the example's"
                    assert not sample.turns, f"{sample.id}: turns that no policy sampled"
                    assert sample.reward is None, f"{sample.id}: a reward that no reward role gave"
                    assert sample.exclusion is None, f"{sample.id}: excluded: {sample.exclusion}"
                    self._assert_tokens(sample)

    def test_samples_can_be_trained_on(self) -> None:
        """The samples of all good rows that a batch may hold together can be packed: token data of one length and
        finite numbers, the same names in every sample of an example.
        """
        for case in self._good():
            samples = self._samples(case)
            for sample in samples:
                wrong = [name for name, value in sample.sequence_data.items() if not _is_finite(value)]
                assert not wrong, f"{sample.id}: {wrong[0]} is {sample.sequence_data[wrong[0]]!r}, no finite number"
                short = [name for name, rows in sample.token_data.items() if len(rows) != len(sample.token_ids)]
                assert not short, f"{sample.id}: token data {short[0]!r} is not one entry per token"
            names = {(frozenset(sample.token_data), frozenset(sample.sequence_data)) for sample in samples}
            assert len(names) <= 1, f"{case.raw}: the samples have different data: {names}"
            if samples:
                batch = pack_samples(samples)
                assert batch.num_sequences == len(samples)

    def test_has_samples_is_true(self) -> None:
        """``has_samples`` of the record says whether examples contain their samples: a flow over others needs a
        generator.
        """
        declared = self.record().has_samples
        for case in self._good():
            count = len(self._samples(case))
            assert bool(count) == declared, f"{case.raw} has {count} samples, and has_samples is {declared}"

    def test_draws_are_independent(self) -> None:
        """Every draw makes samples of its own: what is added to one is neither in the example nor in another draw."""
        for case in self._good():
            example = self._build(case.raw)
            content, kind = _content(example), self._kind()
            wanted = _facts(kind.samples(ExampleDraw(example, 0, "a")))
            for sample in kind.samples(ExampleDraw(example, 1, "b")):
                sample.token_data["added"] = np.ones(len(sample.token_ids), np.float32)
                sample.sequence_data["added"] = 1.0
                sample.exclusion = "thrown away"
                sample.unit_id = "another"
                for array in (sample.token_ids, sample.loss_mask):
                    if array.flags.writeable:
                        array[...] = 0
            assert _facts(kind.samples(ExampleDraw(example, 0, "a"))) == wanted, f"{case.raw}: another draw changed it"
            assert _content(example) == content, f"{case.raw}: a changed sample changed the example"

    def test_a_row_is_interpreted_by_itself(self) -> None:
        """What was built before changes nothing: not other rows, bad ones, or the same row."""
        used = self._kind()
        for _ in range(2):
            for case in self.cases[::-1]:
                if case.trained is None:
                    with pytest.raises(DataError):
                        self._build(case.raw, used)
                else:
                    again = used.samples(ExampleDraw(self._build(case.raw, used), 0, "key"))
                    assert _facts(again) == _facts(self._samples(case)), f"{case.raw}: other samples than before"

    def test_the_row_is_read_only(self) -> None:
        """``build`` does not change what the format made of the row."""
        for case in self._good():
            raw = copy.deepcopy(case.raw)
            self._build(raw)
            assert raw == case.raw, f"the row was changed to {raw}"

    def test_examples_can_be_stored(self) -> None:
        """An example and its samples can be pickled: a runtime sends them to workers, and a buffer keeps them."""
        for case in self._good():
            example = self._build(case.raw)
            stored = pickle.loads(pickle.dumps(example))
            assert (stored.id, stored.num_tokens) == (example.id, example.num_tokens), f"{case.raw}: not as it was"
            assert _content(stored) == _content(example), f"{case.raw}: the content changed"
            found = self._kind().samples(ExampleDraw(stored, 0, "key"))
            assert _facts(found) == _facts(self._samples(case)), f"{case.raw}: a stored example has other samples"

    @pytest.mark.parametrize("odd", ODD)
    def test_odd_rows_are_taken_or_refused(self, odd: str) -> None:
        """With any content that a format may give, ``build`` returns an example whose samples can be packed, or raises
        a ``DataError``, and nothing else.
        """
        for case in self._good():
            raw = ODD[odd](case.raw)
            try:
                example = self._build(raw)
            except DataError:
                continue
            except Exception as error:
                raise AssertionError(f"{odd}: {type(error).__name__} instead of a DataError: {error}") from error
            samples = self._kind().samples(ExampleDraw(example, 0, "key"))
            for sample in samples:
                self._assert_tokens(sample)
                wrong = [name for name, value in sample.sequence_data.items() if not _is_finite(value)]
                assert not wrong, f"{odd}: {wrong[0]} of a sample is {sample.sequence_data[wrong[0]]!r}"

    def test_the_process_stays_as_it_was(self, capfd: pytest.CaptureFixture[str]) -> None:
        """Building prints nothing, writes no file, and changes no state that the process shares, such as seeds."""
        with nothing_changes(capfd):
            for case in self._good():
                self._samples(case)

    # Internal methods

    @classmethod
    def _good(cls) -> list[ExampleKindCase]:
        return [case for case in cls.cases if case.trained is not None]

    def _kind(self) -> ExampleKind:
        kind: ExampleKind = self.build()()
        return kind

    def _build(self, raw: RawExample, kind: ExampleKind | None = None) -> Example:
        row = RowRenderer(CharacterRenderer(), KitFormat(), "data.train[0]", ROW_ID, raw.data_source or SOURCE)
        return (kind or self._kind()).build(raw, row)

    def _samples(self, case: ExampleKindCase) -> list[Sample]:
        return self._kind().samples(ExampleDraw(self._build(case.raw), 0, "key"))

    @staticmethod
    def _assert_tokens(sample: Sample) -> None:
        start, count = len(sample.prompt.token_ids), len(sample.token_ids)
        assert np.array_equal(sample.token_ids[:start], sample.prompt.token_ids), (
            f"{sample.id}: it does not begin with the prompt's tokens"
        )
        assert sample.num_prompt_tokens == start, f"{sample.id}: num_prompt_tokens is {sample.num_prompt_tokens}"
        assert sample.token_ids.dtype.kind == "i", f"{sample.id}: token_ids are {sample.token_ids.dtype}"
        mask = sample.loss_mask
        assert mask.dtype == np.bool_, f"{sample.id}: loss_mask is {mask.dtype}, not bool"
        assert mask.shape == (count,), f"{sample.id}: loss_mask has {mask.shape} for {count} tokens"
        assert not mask[:start].any(), f"{sample.id}: tokens of the prompt are in the loss mask"
        assert mask.any(), f"{sample.id}: nothing is in the loss mask"


def _trained_text(sample: Sample) -> str:
    return "".join(chr(int(token)) for token in sample.token_ids[sample.loss_mask] if token != EOS)


def _content(example: Example) -> list[bytes]:
    return list(example.content())


def _facts(samples: Sequence[Sample]) -> list[tuple[Any, ...]]:
    """What training reads of samples."""
    return [
        (
            sample.id,
            sample.unit_id,
            sample.token_ids.tobytes(),
            sample.loss_mask.tobytes(),
            tuple(sorted((name, np.asarray(rows).tobytes()) for name, rows in sample.token_data.items())),
            tuple(sorted(sample.sequence_data.items())),
        )
        for sample in samples
    ]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
