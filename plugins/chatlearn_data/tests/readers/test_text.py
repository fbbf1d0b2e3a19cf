"""Rows of text files: what is read, and what an error says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chatlearn_core.data import read_rows
from chatlearn_core.data.selection import row_readers
from chatlearn_core.exceptions import DataError
from chatlearn_core.plugins.loader import discover_plugins

ROWS = [{"a": 1, "b": "x"}, {"a": 2, "b": 'é, "quoted"\nline'}]


def read(path: object) -> list[Any]:
    return list(read_rows(str(path), None, row_readers(discover_plugins())))


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
