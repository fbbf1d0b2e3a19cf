"""Reading rows: what is read, and what an error says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from chatlearn_core.data import LocatedRow, read_rows
from chatlearn_core.exceptions import DataError

ROWS = [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]


class FixedReader:
    def __init__(self, name: str = "") -> None:
        self.calls: list[tuple[str, str | None]] = []

    def rows(self, path: str, split: str | None) -> Iterator[Mapping[str, Any]]:
        self.calls.append((path, split))
        yield from ROWS


class ValueReader:
    """A file with one number has one row; one with another text has a row that cannot be used."""

    def rows(self, path: str, split: str | None) -> Iterator[Mapping[str, Any] | LocatedRow]:
        text = Path(path).read_text()
        yield {"a": int(text)} if text.isdigit() else LocatedRow(f"{path} line 1", error=f"no number: {text}")
        yield {"a": 0}


def read(path: object, split: str | None = None) -> list[Any]:
    return list(read_rows(str(path), split, {".one": ValueReader, ".two": ValueReader}))


def test_a_row_that_its_reader_cannot_use_keeps_place_and_reason(tmp_path: Path) -> None:
    (tmp_path / "rows.one").write_text("many")
    bad, good = read(tmp_path / "rows.one")
    assert bad == LocatedRow(f"{tmp_path / 'rows.one'} line 1", error="no number: many")
    assert good == LocatedRow(f"{tmp_path / 'rows.one'} row 2", {"a": 0})


def test_a_file_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "rows.one").write_text("1")

    class Refused(ValueReader):
        def rows(self, path: str, split: str | None) -> Iterator[Mapping[str, Any] | LocatedRow]:
            raise PermissionError(13, "Permission denied")

    with pytest.raises(DataError, match=r"rows.one' cannot be read: Permission denied"):
        list(read_rows(str(tmp_path / "rows.one"), None, {".one": Refused}))


def test_missing_file_suggests_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"(?s)tarin.jsonl' does not exist.*Did you mean '.*train.jsonl'"):
        read(tmp_path / "tarin.jsonl")
    with pytest.raises(DataError, match=r"nowhere' does not exist either"):
        read(tmp_path / "nowhere" / "train.jsonl")


def test_unknown_suffix_lists_what_is_readable(tmp_path: Path) -> None:
    (tmp_path / "rows.xlsx").write_text("")
    with pytest.raises(DataError, match=r"(?s)'.xlsx'.*Readable: \.one, \.two\.$"):
        read(tmp_path / "rows.xlsx")


def test_parquet_without_a_reader_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_text("")
    with pytest.raises(DataError, match="chatlearn-data"):
        read(tmp_path / "rows.parquet")


def test_a_registered_reader_gets_its_suffix(tmp_path: Path) -> None:
    (tmp_path / "rows.lance").write_text("")
    rows = list(read_rows(str(tmp_path / "rows.lance"), None, {".lance": FixedReader}))
    assert [row.row for row in rows] == ROWS
    assert rows[1].place.endswith("rows.lance row 2")


def test_directory_reads_files_in_order_and_passes_hidden_and_foreign_ones(tmp_path: Path) -> None:
    for name, value in [("b.one", 2), ("a.two", 1), ("deep/c.ONE", 3), (".cache/d.one", 4), ("README.md", 5)]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(str(value))
    assert [row.row["a"] for row in read(tmp_path)][::2] == [1, 2, 3]


def test_directory_with_several_splits_needs_one_named(tmp_path: Path) -> None:
    (tmp_path / "train-00.one").write_text("1")
    (tmp_path / "test-00.one").write_text("2")
    with pytest.raises(DataError, match=r"several splits \(test, train\)"):
        read(tmp_path)
    assert read(tmp_path, "test")[0].row == {"a": 2}
    with pytest.raises(DataError, match=r"split 'dev'.*test-00.one, train-00.one"):
        read(tmp_path, "dev")


def test_directory_without_data_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no data file"):
        read(tmp_path)


def test_hub_id_goes_to_the_hub_reader_with_its_split() -> None:
    reader = FixedReader()
    rows = list(read_rows("owner/name:main", "test", {"hub": lambda: reader}))
    assert reader.calls == [("owner/name:main", "test")]
    assert rows[0].place == "owner/name:main:test row 1"


def test_hub_id_without_a_hub_reader_says_so() -> None:
    with pytest.raises(DataError, match="no installed plugin reads hub datasets"):
        read("owner/name")
