"""The contract of a dataset format: it interprets rows, and a bad row is an error that says what is wrong with it."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import pytest

from chatlearn_core.data import DatasetFormat, RawExample, Row
from chatlearn_core.exceptions import DataError
from chatlearn_core.plugins.records import Kind
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.suites.conformance_suite import ConformanceSuite, nothing_changes

ODD_VALUES: Mapping[str, Any] = {
    "null": None,
    "an empty text": "",
    "a blank text": " \n",
    "a number": 7,
    "NaN": math.nan,
    "a truth value": True,
    "an empty list": [],
    "a list of nulls": [None, None],
    "an object": {"unexpected": [1, {"deep": None}]},
    "bytes": b"\xff\x00",
    "broken Unicode": "\x00\ud800",
    "a long text": "x" * 100_000,
}
UNUSED = "column_that_no_format_uses"


@dataclass(slots=True, frozen=True)
class RowCase:
    """One row and the example it must become."""

    row: Row
    example: RawExample | None
    """None: the row is bad and must raise a ``DataError``. ``columns`` is not compared."""


class DatasetConformance(ConformanceSuite):
    """Contract tests that every dataset format must pass.

    A subclass sets ``backend``, ``options``, and ``cases``: at least one row that can be used and one that cannot.
    Readers of files (``DatasetSpec.reads``) have a suite of their own, ``ReaderConformance``.
    """

    kind: ClassVar[Kind] = "dataset"
    settable: ClassVar[frozenset[str]] = frozenset({"cases"})
    cases: ClassVar[Sequence[RowCase]]

    def test_is_a_format(self) -> None:
        """The object has the attributes of ``DatasetFormat``: two tuples of column names and a truth value."""
        row_format = self._format()
        for name in ("answer_columns", "completion_columns"):
            value = getattr(row_format, name)
            assert isinstance(value, tuple), f"{name} is {value!r}; it must be a tuple of column names"
            assert all(isinstance(column, str) for column in value), f"{name} is {value!r}"
        assert type(row_format.answer_required) is bool, f"answer_required is {row_format.answer_required!r}"

    def test_cases_hold_good_and_bad_rows(self) -> None:
        """The cases can tell a format that takes everything, or nothing, from one that works."""
        assert self._good(), "set a case with the example that its row must become"
        assert any(case.example is None for case in self.cases), "set a case whose row is bad (example=None)"

    def test_rows_become_their_examples(self) -> None:
        """Every field of the example but ``columns`` has its expected value."""
        row_format = self._format()
        for case in self._good():
            self._assert_example(row_format.parse(case.row), case)

    def test_a_bad_row_is_an_error_with_a_reason(self) -> None:
        """A bad row raises a ``DataError`` that names a column of the row, or one that it lacks. It gives only the
        reason, in one line: the pipeline adds file and line.
        """
        row_format = self._format()
        known = {name for case in self.cases for name in case.row} | set(self.record().columns)
        known |= {*row_format.answer_columns, *row_format.completion_columns}
        for case in self.cases:
            if case.example is None:
                with pytest.raises(DataError) as caught:
                    row_format.parse(case.row)
                reason = str(caught.value)
                assert any(name in reason for name in known), f"{reason!r} names none of the columns {sorted(known)}"

    def test_examples_are_well_formed(self) -> None:
        """Prompts and completions are texts or messages with role and content; ids and sources are texts; there is one
        finite rank, or one label, for each completion.
        """
        for case in self._good():
            example = self._format().parse(case.row)
            contents = [example.prompt, *example.completions]
            contents += [example.completion] if example.completion is not None else []
            for content in contents:
                assert content, f"{case.row}: an empty prompt or completion"
                if not isinstance(content, str):
                    wrong = [m for m in content if not isinstance(m, Mapping) or "role" not in m]
                    assert not wrong, f"{case.row}: {wrong[0]!r} is no message"
            for name in ("id", "data_source"):
                value = getattr(example, name)
                assert value is None or type(value) is str, f"{case.row}: {name} is {value!r}, not a text"
            count = len(example.completions)
            assert not (example.ranks and example.labels), f"{case.row}: both ranks and labels"
            assert len(example.ranks) in (0, count), f"{case.row}: {len(example.ranks)} ranks, {count} completions"
            assert len(example.labels) in (0, count), f"{case.row}: {len(example.labels)} labels, {count} completions"
            assert all(math.isfinite(rank) for rank in example.ranks), f"{case.row}: ranks {example.ranks}"
            assert all(type(label) is bool for label in example.labels), f"{case.row}: labels {example.labels}"

    def test_the_row_is_read_only(self) -> None:
        """``parse`` changes neither the row nor what is inside its lists and objects, and an example does not change
        if the row's values are changed later.
        """
        row_format = self._format()
        for case in self._good():
            row = copy.deepcopy(dict(case.row))
            example = row_format.parse(row)
            assert _plain(row) == _plain(case.row), f"the row was changed to {row}"
            _scramble(row)
            self._assert_example(example, case)

    def test_a_row_is_interpreted_by_itself(self) -> None:
        """What was parsed before changes nothing: not other rows, bad ones, or the same row."""
        used = self._format()
        for _ in range(2):
            for case in self.cases[::-1]:
                if case.example is None:
                    with pytest.raises(DataError):
                        used.parse(case.row)
                else:
                    self._assert_example(used.parse(case.row), case)

    def test_lists_of_every_kind_are_taken(self) -> None:
        """Readers give lists as lists, tuples or numpy arrays, whatever the file's kind: each becomes the same."""
        row_format = self._format()
        nested = [case for case in self._good() if any(isinstance(value, list) for value in case.row.values())]
        if not nested:
            not_applicable("no case has a list in its row")
        for case in nested:
            self._assert_example(row_format.parse({name: _as_tuples(value) for name, value in case.row.items()}), case)

    def test_other_columns_reach_the_rewards(self) -> None:
        """A column that the format does not know changes nothing, and is among the example's ``columns``."""
        row_format = self._format()
        for case in self._good():
            example = row_format.parse({**case.row, UNUSED: "kept"})
            self._assert_example(example, case)
            assert example.columns.get(UNUSED) == "kept", f"column {UNUSED!r} is lost: columns are {example.columns}"

    @pytest.mark.parametrize("odd", ODD_VALUES)
    def test_odd_values_are_taken_or_refused(self, odd: str) -> None:
        """With any value in any column, ``parse`` returns an example or raises a ``DataError``, and nothing else."""
        row_format = self._format()
        for case in self._good():
            for column in case.row:
                self._parse_or_refuse(row_format, {**case.row, column: ODD_VALUES[odd]}, f"{column!r} is {odd}")

    def test_missing_columns_are_taken_or_refused(self) -> None:
        """Without a column, ``parse`` returns an example or raises a ``DataError``. The ground truth comes from the
        columns in ``answer_columns`` (``column.key`` for a part of one), and from no others: the error for a row
        without an answer lists them.
        """
        row_format = self._format()
        answers = {name.partition(".")[0] for name in row_format.answer_columns}
        self._parse_or_refuse(row_format, {}, "the row is empty")
        for case in self._good():
            for column in case.row:
                rest = {name: value for name, value in case.row.items() if name != column}
                example = self._parse_or_refuse(row_format, rest, f"{column!r} is missing")
                lost = example is not None and example.ground_truth is None
                if lost and case.example is not None and case.example.ground_truth is not None:
                    assert column in answers, f"the answer is in {column!r}; list it in answer_columns"
            rest = {name: value for name, value in case.row.items() if name not in answers}
            if len(rest) < len(case.row):
                example = self._parse_or_refuse(row_format, rest, "the answer's columns are missing")
                assert example is None or example.ground_truth is None, (
                    f"the ground truth {example.ground_truth!r} comes from no column in answer_columns"
                )

    def test_declared_columns_are_those_of_its_rows(self) -> None:
        """Every good row has all of the record's ``columns``: ``format: auto`` chooses a format by them."""
        columns = self.record().columns
        if not columns:
            not_applicable("the record declares no columns: the format is chosen by name")
        for case in self._good():
            assert columns <= case.row.keys(), f"{case.row} lacks {sorted(columns - case.row.keys())}"

    def test_the_process_stays_as_it_was(self, capfd: pytest.CaptureFixture[str]) -> None:
        """Parsing prints nothing, writes no file, and changes no state that the process shares, such as seeds."""
        with nothing_changes(capfd):
            row_format = self._format()
            for case in self._good():
                row_format.parse(case.row)

    @classmethod
    def _good(cls) -> list[RowCase]:
        return [case for case in cls.cases if case.example is not None]

    def _format(self) -> DatasetFormat:
        row_format: DatasetFormat = self.build()(self.make_options())
        return row_format

    def _assert_example(self, found: RawExample, case: RowCase) -> None:
        assert case.example is not None
        assert isinstance(found, RawExample), f"{case.row} becomes a {type(found).__name__}, not a RawExample"
        for field in fields(RawExample):
            if field.name != "columns":
                one, other = (_plain(getattr(example, field.name)) for example in (found, case.example))
                assert one == other, f"{case.row}: {field.name} is {one!r} instead of {other!r}"

    @staticmethod
    def _parse_or_refuse(row_format: DatasetFormat, row: Row, what: str) -> RawExample | None:
        try:
            example = row_format.parse(copy.deepcopy(dict(row)))
        except DataError:
            return None
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__} instead of a DataError: {error}") from error
        assert isinstance(example, RawExample), f"{what}: {type(example).__name__} instead of a RawExample"
        return example


def _plain(value: Any) -> Any:
    """Return the value with every sequence as a list and every mapping as a dictionary, to compare."""
    if isinstance(value, Mapping):
        return {name: _plain(content) for name, content in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(content) for content in value]
    return value


def _as_tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_as_tuples(content) for content in value)
    if isinstance(value, dict):
        return {name: _as_tuples(content) for name, content in value.items()}
    return value


def _scramble(value: Any) -> None:
    """Change every list and dictionary inside, in place."""
    if isinstance(value, dict):
        for content in value.values():
            _scramble(content)
        for name in value:
            if not isinstance(value[name], list | dict):
                value[name] = "changed later"
    elif isinstance(value, list):
        for content in value:
            _scramble(content)
        if value and not any(isinstance(content, list | dict) for content in value):
            value[:] = ["changed later"] * len(value)
