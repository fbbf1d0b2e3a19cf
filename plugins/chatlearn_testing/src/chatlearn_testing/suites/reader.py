"""The contract of a reader: it gives the rows of files in order, and an unreadable file is an error that names it."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from chatlearn_core.data.reader import LocatedRow, RowReader, read_rows
from chatlearn_core.exceptions import DataError
from chatlearn_core.plugins.records import Kind
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.processes import open_files
from chatlearn_testing.suites.conformance_suite import ConformanceSuite, nothing_changes

HUB = "hub"
NAME = "rows of 漢字 & more"
"""Name of the files, without suffix."""
Content = bytes | Callable[[Path], object]
"""The bytes of a file, or ``(path)``: writes the file, or for a reader of ``hub`` a folder that the library behind it
loads in place of a dataset's id."""
DAMAGES: Mapping[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut in half": lambda content: content[: len(content) // 2],
    "without its first byte": lambda content: content[1:],
    "with bytes that are no text in the middle": lambda content: (
        content[: len(content) // 2] + b"\xff\xfe\x00\xd8" + content[len(content) // 2 :]
    ),
    "another kind of file": lambda content: b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
    "zeros": lambda content: bytes(len(content)),
}


@dataclass(slots=True, frozen=True)
class ReaderCase:
    """A file and the rows that it must give.

    Example: ``ReaderCase(b'{"a": 1}\\nno JSON\\n', rows=({"a": 1}, None))``.
    """

    content: Content
    rows: Sequence[Mapping[str, Any] | None] | None
    """The rows in order. None for a row: it cannot be used and must be located with an error, and reading goes on. None
    for all: the file cannot be read and must raise a ``DataError``."""


class ReaderConformance(ConformanceSuite):
    """Contract tests that every reader of files or hub datasets (``DatasetSpec.reads``) must pass.

    A subclass sets ``backend``, ``options`` and ``cases``: at least one file that can be read, with two rows or more.
    """

    kind: ClassVar[Kind] = "dataset"
    settable: ClassVar[frozenset[str]] = frozenset({"cases"})
    cases: ClassVar[Sequence[ReaderCase]]

    def test_is_a_reader(self) -> None:
        """The object has the method ``rows``; the record reads suffixes in lower case with their dot, or ``hub``."""
        assert callable(getattr(self._reader(), "rows", None)), "it has no method rows"
        reads = self.record().reads
        assert reads, "the record reads nothing: it is the record of a format, with the suite DatasetConformance"
        wrong = sorted(s for s in reads if s != HUB and not (s.startswith(".") and s == s.lower() and len(s) > 1))
        assert not wrong, f"reads has {wrong[0]!r}: a suffix in lower case with its dot, or 'hub'"
        assert not self.record().columns, "a reader has no columns: formats do"

    def test_cases_can_tell_right_from_wrong(self) -> None:
        """There is a file with at least two different rows."""
        counts = [len({repr(row) for row in case.rows if row is not None}) for case in self.cases if case.rows]
        assert max(counts, default=0) >= 2, "set a case with at least two different rows"

    def test_files_give_their_rows(self, tmp_path: Path) -> None:
        """Every row of the cases has its expected values, in stored order, whatever suffix the file has."""
        for suffix in sorted(self.record().reads):
            for number, case in enumerate(self._readable()):
                found = self._rows(self._write(case, tmp_path / suffix / str(number), suffix))
                wanted = [None if row is None else dict(row) for row in case.rows or ()]
                assert [None if row is None else dict(row) for row in found] == wanted, f"case {number}, {suffix}"

    def test_rows_are_mappings_or_located(self, tmp_path: Path) -> None:
        """A row is a mapping of column names, or a ``LocatedRow`` with either a row or an error of one line, and a
        place that names the file.
        """
        for number, case in enumerate(self._readable()):
            path = self._write(case, tmp_path / str(number))
            for row in self._reader().rows(path, None):
                if isinstance(row, LocatedRow):
                    assert path in row.place, f"the place {row.place!r} does not name the file"
                    assert (row.row is None) != (row.error is None), f"{row.place}: either a row or an error"
                    assert row.error is None or row.error.strip(), f"{row.place}: the error says nothing"
                    assert "\n" not in (row.error or ""), f"{row.place}: the error has several lines"
                values = row.row if isinstance(row, LocatedRow) else row
                assert values is None or isinstance(values, Mapping), f"a row is a {type(values).__name__}"
                assert all(isinstance(name, str) for name in values or ()), f"a column's name is no text: {values}"

    def test_places_tell_rows_apart(self, tmp_path: Path) -> None:
        """As the core reads the file, every row has a place of its own, so that a message leads to it."""
        for number, case in enumerate(self._readable()):
            self._files_only()
            places = [row.place for row in self._through_core(self._write(case, tmp_path / str(number)))]
            assert len(set(places)) == len(places), f"case {number}: two rows have one place: {places[:4]}"
            assert len(places) == len(case.rows or ()), f"case {number}: {len(places)} rows"

    def test_unreadable_files_are_errors_that_name_them(self, tmp_path: Path) -> None:
        """A file that cannot be read raises a ``DataError`` with its path."""
        cases = [case for case in self.cases if case.rows is None]
        if not cases:
            not_applicable("no case is unreadable (rows=None)")
        for number, case in enumerate(cases):
            path = self._write(case, tmp_path / str(number))
            with pytest.raises(DataError) as caught:
                self._rows(path)
            assert Path(path).name in str(caught.value), f"the message does not name the file: {caught.value}"

    @pytest.mark.parametrize("damage", DAMAGES)
    def test_damaged_files_are_read_or_refused(self, damage: str, tmp_path: Path) -> None:
        """A damaged file gives rows, rows with errors, or a ``DataError`` with its path, and nothing else."""
        self._files_only()
        for number, case in enumerate(self.cases):
            path = Path(self._write(case, tmp_path / str(number)))
            path.write_bytes(DAMAGES[damage](path.read_bytes()))
            try:
                for row in self._through_core(str(path)):
                    assert (row.row is None) != (row.error is None), f"{damage}: {row}"
            except DataError as error:
                if path.name not in str(error):
                    raise AssertionError(f"{damage}: the message does not name the file: {error}") from error
            except AssertionError:
                raise
            except Exception as error:
                raise AssertionError(f"{damage}: {type(error).__name__} instead of a DataError: {error}") from error

    def test_reading_is_lazy_and_closes_the_file(self, tmp_path: Path) -> None:
        """Building a reader and calling ``rows`` opens nothing; a file is closed at its end, and when reading stops
        early: a run with ``limit`` does not read on.
        """
        self._files_only()
        case = self._readable()[0]
        path = self._write(case, tmp_path)
        for count in (0, 1, None):
            rows = iter(self._reader().rows(path, None))
            if count == 0:
                assert not self._is_open(path), "calling rows opens the file before a row is asked for"
            for _ in range(len(case.rows or ()) if count is None else count):
                next(rows)
            if count is None:
                assert next(rows, None) is None, "more rows than expected"
            close = getattr(rows, "close", None)
            if close is not None:
                close()
            del rows
            assert not self._is_open(path), f"the file is open after {'all' if count is None else count} rows"

    def test_a_file_may_be_read_twice(self, tmp_path: Path) -> None:
        """Reading again gives the same, also by the same reader and while another reading is at work; rows that were
        given may be changed.
        """
        case = self._readable()[0]
        path, other = self._write(case, tmp_path / "one"), self._write(self._readable()[-1], tmp_path / "other")
        wanted = copy.deepcopy(self._rows(path))
        reader = self._reader()
        first, second = reader.rows(path, None), reader.rows(other, None)
        found = []
        for row in first:
            next(second, None)
            values = row.row if isinstance(row, LocatedRow) else row
            found.append(None if values is None else dict(values))
            if isinstance(values, dict):
                values.clear()
        assert found == wanted, "two readings at a time mix"
        again = [row.row if isinstance(row, LocatedRow) else row for row in reader.rows(path, None)]
        assert again == wanted, "the second reading gives other rows"

    def test_the_split_is_ignored_by_files(self, tmp_path: Path) -> None:
        """A split is of hub datasets: a file has the same rows whatever it is."""
        self._files_only()
        for number, case in enumerate(self._readable()):
            path = self._write(case, tmp_path / str(number))
            rows = [row.row if isinstance(row, LocatedRow) else row for row in self._reader().rows(path, "test")]
            assert rows == self._rows(path), f"case {number}: with a split, other rows"

    def test_files_are_left_as_they_are(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        """Reading changes no file, makes none beside it, prints nothing, and changes no state of the process."""
        self._files_only()
        for number, case in enumerate(self._readable()):
            path = Path(self._write(case, tmp_path / str(number)))
            before = (path.read_bytes(), path.stat().st_mtime_ns, sorted(path.parent.iterdir()))
            self._rows(str(path))
            with nothing_changes(capfd):
                self._rows(str(path))
            after = (path.read_bytes(), path.stat().st_mtime_ns, sorted(path.parent.iterdir()))
            assert before == after, f"case {number}: the file or its folder was changed"

    # Internal methods

    def _files_only(self) -> None:
        if HUB in self.record().reads:
            not_applicable("the record reads hub datasets, which a library keeps")

    @classmethod
    def _readable(cls) -> list[ReaderCase]:
        return [case for case in cls.cases if case.rows is not None]

    def _reader(self) -> RowReader:
        reader: RowReader = self.build()(self.make_options())
        return reader

    def _rows(self, path: str) -> list[Mapping[str, Any] | None]:
        """The rows of a file; None for those with an error."""
        return [row.row if isinstance(row, LocatedRow) else row for row in self._reader().rows(path, None)]

    def _through_core(self, path: str) -> Iterator[LocatedRow]:
        return read_rows(path, None, dict.fromkeys(self.record().reads, self._reader))

    def _write(self, case: ReaderCase, folder: Path, suffix: str = "") -> str:
        """Write a case's file, and return its path."""
        suffix = suffix or min(self.record().reads)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / ("rows" if suffix == HUB else f"{NAME}{suffix}")
        if isinstance(case.content, bytes):
            path.write_bytes(case.content)
        else:
            case.content(path)
        return str(path)

    @staticmethod
    def _is_open(path: str) -> bool:
        return os.path.realpath(path) in {os.path.realpath(name) for name in open_files(os.getpid())}
