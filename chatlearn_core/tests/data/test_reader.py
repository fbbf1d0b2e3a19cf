"""Reading rows: what is read, and what an error says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from chatlearn_core.data import read_rows
from chatlearn_core.exceptions import DataError

ROWS = [{"a": 1, "b": "x"}, {"a": 2, "b": 'é, "quoted"\nline'}]


class FixedReader:
    def __init__(self, name: str = "") -> None:
        self.calls: list[tuple[str, str | None]] = []

    def rows(self, path: str, split: str | None) -> Iterator[Mapping[str, Any]]:
        self.calls.append((path, split))
        yield from ROWS


def read(path: object, split: str | None = None, **readers: Any) -> list[Any]:
    return list(read_rows(str(path), split, readers))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", "\n".join(json.dumps(row) for row in ROWS)),
        ("bom.jsonl", "\ufeff" + "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n"),
        ("array.json", json.dumps(ROWS, indent=1)),
        ("lines.json", "\n".join(json.dumps(row) for row in ROWS)),
        ("UPPER.JSONL", "\r\n".join(json.dumps(row) for row in ROWS)),
    ],
)
def test_reads_json_in_every_common_shape(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8", newline="")
    assert [located.row for located in read(tmp_path / name)] == ROWS


def test_reads_csv_with_quotes_and_newlines(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('a,b\n1,x\n2,"é, ""quoted""\nline"\n', encoding="utf-8")
    located = read(tmp_path / "rows.csv")
    assert [row.row for row in located] == [{"a": "1", "b": "x"}, {"a": "2", "b": ROWS[1]["b"]}]
    assert located[0].place.endswith("rows.csv line 2")


def test_csv_row_of_another_width_is_a_bad_row(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a,b\n1\n1,2,3\n1,2\n")
    assert [row.error is None for row in read(tmp_path / "rows.csv")] == [False, False, True]


def test_places_count_lines_of_the_file_blank_ones_included(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n')
    assert [row.place.split()[-1] for row in read(tmp_path / "rows.jsonl")] == ["1", "3"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"a": 1', ["not valid JSON", "column 8", '{"a": 1']),
        ('{"a": ' + "x" * 200, ["not valid JSON", "x..."]),
        ("[1, 2]", ["must be a JSON object", "list"]),
        ("7", ["must be a JSON object", "int"]),
        ("[" * 100_000, ["cannot be read", "[[["]),
        ('{"a": ' + "1" * 5000 + "}", ["cannot be read", "digits"]),
        (r'{"a": "\ud83d"}', ["surrogate"]),
    ],
)
def test_malformed_line_is_yielded_with_its_reason_and_reading_goes_on(
    tmp_path: Path, line: str, words: list[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n' + line + '\n{"a": 3}\n')
    first, bad, last = read(tmp_path / "rows.jsonl")
    assert (first.row, bad.row, last.row) == ({"a": 1}, None, {"a": 3})
    assert bad.place == f"{tmp_path / 'rows.jsonl'} line 2"
    assert all(word in bad.error for word in words), bad.error


def test_whole_surrogate_pairs_are_characters(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(r'{"a": "\ud83d\ude00"}')
    assert read(tmp_path / "rows.jsonl")[0].row == {"a": "😀"}


def test_line_that_is_not_utf8_names_byte_and_offset_in_the_file(tmp_path: Path) -> None:
    content = b'{"a": 1}\n{"a": "caf\xe9"}\n{"a": 3}\n'
    (tmp_path / "rows.jsonl").write_bytes(content)
    rows = read(tmp_path / "rows.jsonl")
    assert [row.error is None for row in rows] == [True, False, True]
    assert "byte 0xe9" in rows[1].error
    assert f"offset {content.index(0xE9)} " in rows[1].error


@pytest.mark.parametrize("name", ["rows.json", "rows.csv"])
def test_whole_files_that_are_not_utf8_are_errors(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b'[{"a": "caf\xe9"}]')
    with pytest.raises(DataError, match=r"0xe9 at offset 11"):
        read(tmp_path / name)


def test_malformed_json_array_names_line_and_column(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('[\n {"a": 1},\n {"a" 2}\n]')
    with pytest.raises(DataError, match=r"rows.json' line 3: not valid JSON .*column 7"):
        read(tmp_path / "rows.json")


def test_missing_file_suggests_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"(?s)tarin.jsonl' does not exist.*Did you mean '.*train.jsonl'"):
        read(tmp_path / "tarin.jsonl")
    with pytest.raises(DataError, match=r"nowhere' does not exist either"):
        read(tmp_path / "nowhere" / "train.jsonl")


def test_unknown_suffix_lists_what_is_readable(tmp_path: Path) -> None:
    (tmp_path / "rows.xlsx").write_text("")
    with pytest.raises(DataError, match=r"(?s)'.xlsx'.*\.csv, \.json, \.jsonl"):
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
    for name, value in [("b.jsonl", 2), ("a.json", 1), ("deep/c.csv", 3), (".cache/d.jsonl", 4), ("README.md", 5)]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a\n3\n" if name.endswith("csv") else json.dumps({"a": value}))
    assert [row.row for row in read(tmp_path)] == [{"a": 1}, {"a": 2}, {"a": "3"}]


def test_directory_with_several_splits_needs_one_named(tmp_path: Path) -> None:
    (tmp_path / "train-00.jsonl").write_text('{"a": 1}')
    (tmp_path / "test-00.jsonl").write_text('{"a": 2}')
    with pytest.raises(DataError, match=r"several splits \(test, train\)"):
        read(tmp_path)
    assert [row.row for row in read(tmp_path, "test")] == [{"a": 2}]
    with pytest.raises(DataError, match=r"split 'dev'.*test-00.jsonl, train-00.jsonl"):
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
