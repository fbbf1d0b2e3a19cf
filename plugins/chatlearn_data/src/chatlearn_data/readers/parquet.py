"""Reads rows of parquet files."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from chatlearn_core.data.format import Row
from chatlearn_core.exceptions import DataError
from chatlearn_data.options import NoOptions

_BATCH_ROWS = 1024
"""Number of rows decoded at once: fast, but still streaming."""


class ParquetReader:
    """Streams a parquet file; nested columns become dictionaries and lists."""

    def __init__(self, options: NoOptions) -> None:
        del options

    def rows(self, path: str, split: str | None) -> Iterator[Row]:
        del split
        start = 0
        try:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                    yield from batch.to_pylist()
                    start += len(batch)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
            raise DataError(f"Data file '{path}' is not a readable parquet file: {error}.") from error
        except UnicodeDecodeError as error:
            raise DataError(f"Data file '{path}' has text that is not UTF-8, after row {start}: {error}.") from error
