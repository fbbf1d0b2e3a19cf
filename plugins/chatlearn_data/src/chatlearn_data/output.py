"""Writes records atomically: the file is complete or absent."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from chatlearn_core.exceptions import DataError

SUFFIXES = (".jsonl", ".parquet")


def check_suffix(path: Path) -> None:
    """Check that ``write_records`` supports the suffix of ``path``, before any work is done.

    Raises:
        DataError: the suffix is unsupported.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"Output '{path}' must end in {' or '.join(SUFFIXES)}; the suffix selects the file format.")


def write_records(path: Path, records: Iterable[Mapping[str, Any]]) -> int:
    """Write records as JSON Lines or parquet, by suffix, creating directories. Returns the number of records.

    Raises:
        DataError: the suffix is unsupported, or the file cannot be written (an existing file is unchanged).
    """
    check_suffix(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise DataError(f"Output '{path}' cannot be written: {error.strerror or error}.") from error
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            count = (
                _write_parquet(stream, records) if path.suffix.lower() == ".parquet" else _write_jsonl(stream, records)
            )
            stream.flush()
            os.fsync(stream.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except OSError as error:
        raise DataError(f"Output '{path}' cannot be written: {error.strerror or error}.") from error
    finally:
        temporary.unlink(missing_ok=True)
    return count


def _write_jsonl(stream: BinaryIO, records: Iterable[Mapping[str, Any]]) -> int:
    count = 0
    for record in records:
        stream.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        count += 1
    return count


def _write_parquet(stream: BinaryIO, records: Iterable[Mapping[str, Any]]) -> int:
    import pyarrow as pa  # imported only to write parquet
    import pyarrow.parquet as pq

    rows = list(records)
    pq.write_table(pa.Table.from_pylist(rows), stream)
    return len(rows)


def _umask() -> int:
    """The process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
