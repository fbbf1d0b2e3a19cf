"""Writing files whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from chatlearn_core.exceptions import DataError
from chatlearn_data.output import write_records

ROWS = [{"id": "é/0", "prompt": [{"role": "user", "content": "x\ny"}]}, {"id": "1", "prompt": []}]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_come_back(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "new" / f"rows{suffix}"
    assert write_records(path, ROWS) == 2
    if suffix == ".jsonl":
        assert [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] == ROWS
    else:
        assert pq.read_table(path).to_pylist() == ROWS
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("old")

    def rows() -> Iterator[Any]:
        yield ROWS[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_records(path, rows())
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    def rows() -> Iterator[Any]:
        yield ROWS[0]
        raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match=r"rows.jsonl' cannot be written: No space left on device"):
        write_records(tmp_path / "rows.jsonl", rows())
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        write_records(tmp_path / "file" / "rows.jsonl", ROWS)


def test_another_suffix_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"must end in \.jsonl or \.parquet"):
        write_records(tmp_path / "rows.txt", ROWS)
