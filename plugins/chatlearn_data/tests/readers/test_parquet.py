"""Rows of parquet files."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chatlearn_core.exceptions import DataError
from chatlearn_data.options import NoOptions
from chatlearn_data.readers.parquet import ParquetReader


def test_nested_rows_come_back_as_they_were_over_several_batches(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": str(i)}], "reward_model": {"ground_truth": i}} for i in range(2500)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert list(ParquetReader(NoOptions()).rows(str(tmp_path / "rows.parquet"), None)) == rows


@pytest.mark.parametrize("content", [b"", b"PAR1 not really", b"{}"])
def test_a_file_that_is_no_parquet_is_an_error_with_its_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rows.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"rows.parquet' is not a readable parquet file"):
        list(ParquetReader(NoOptions()).rows(str(tmp_path / "rows.parquet"), None))


def test_a_file_cut_short_is_an_error(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": list(range(10_000))}), tmp_path / "rows.parquet")
    content = (tmp_path / "rows.parquet").read_bytes()
    (tmp_path / "rows.parquet").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match="not a readable parquet"):
        list(ParquetReader(NoOptions()).rows(str(tmp_path / "rows.parquet"), None))


def test_text_that_is_not_utf8_is_an_error(tmp_path: Path) -> None:
    data = pa.array([b"ok", b"caf\xe9"], type=pa.binary()).view(pa.string())
    pq.write_table(pa.table({"a": data}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="not UTF-8, after row 0"):
        list(ParquetReader(NoOptions()).rows(str(tmp_path / "rows.parquet"), None))
