"""The reader ``acme``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from chatlearn_core.data.reader import LocatedRow
from chatlearn_core.exceptions import DataError

from acme_plugin.options import AcmeOptions


class AcmeReader:
    """Streams a file of tab-separated values; the first line names the columns, and every value is text.

    Implements ``chatlearn_core.data.reader.RowReader``. A line that gives no row is yielded with its error, and reading
    goes on.
    """

    def __init__(self, options: AcmeOptions) -> None:
        del options

    def rows(self, path: str, split: str | None) -> Iterator[LocatedRow]:
        """Yield the rows of a file. Raises: DataError: the header cannot be read; names the file."""
        del split  # of hub datasets
        header: list[str] = []
        with Path(path).open("rb") as stream:
            for number, raw in enumerate(stream, start=1):
                place = f"{path} line {number}"
                try:
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                except UnicodeDecodeError as error:
                    problem = f"not UTF-8: {error.reason} at byte {error.start}"
                    if not header:
                        raise DataError(f"{place}: {problem}") from error
                    yield LocatedRow(place, error=problem)
                    continue
                values = line.split("\t")
                if not header:
                    header = values
                    if len(set(header)) < len(header):
                        raise DataError(f"{place}: the header names a column twice: {line!r:.80}")
                elif len(values) == len(header):
                    yield LocatedRow(place, dict(zip(header, values, strict=True)))
                elif line:
                    yield LocatedRow(place, error=f"has {len(values)} values for {len(header)} columns")
