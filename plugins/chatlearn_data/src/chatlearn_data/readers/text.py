"""Reads rows of text files: JSON Lines, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chatlearn_core.data.reader import LocatedRow
from chatlearn_core.exceptions import DataError
from chatlearn_data.options import NoOptions

_EXCERPT = 60
"""Number of characters of a malformed line that an error shows."""


class JsonLinesReader:
    """Streams a JSON Lines file. Blank lines and a byte-order mark are skipped.

    A line without a valid row (malformed JSON, not UTF-8, not an object) is yielded with its error.
    """

    def __init__(self, options: NoOptions) -> None:
        del options

    def rows(self, path: str, split: str | None) -> Iterator[LocatedRow]:
        del split
        offset = 0
        with Path(path).open("rb") as stream:
            for number, raw in enumerate(stream, start=1):
                place = f"{path} line {number}"
                start, offset = offset, offset + len(raw)
                try:
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                except UnicodeDecodeError as error:
                    yield LocatedRow(place, error=_not_utf8(error, raw, start))
                    continue
                if line:
                    yield _json_row(line, place)


class JsonReader:
    """Reads a JSON file: an array of objects, or JSON Lines under that suffix, as often published."""

    def __init__(self, options: NoOptions) -> None:
        self._lines = JsonLinesReader(options)

    def rows(self, path: str, split: str | None) -> Iterator[LocatedRow]:
        raw = Path(path).read_bytes()
        if raw.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] != b"[":
            yield from self._lines.rows(path, split)
            return
        try:
            rows = json.loads(raw.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise DataError(f"Data file '{path}': {_not_utf8(error, raw, 0)}") from error
        except json.JSONDecodeError as error:
            line = raw.decode("utf-8-sig").split("\n")[error.lineno - 1]
            raise DataError(
                f"Data file '{path}' line {error.lineno}: not valid JSON "
                f"({error.msg} at column {error.colno}): {_excerpt(line)}"
            ) from error
        except (RecursionError, ValueError) as error:
            raise DataError(f"Data file '{path}' is JSON that cannot be read: {error}.") from error
        for number, row in enumerate(rows, start=1):
            yield _object_row(row, f"{path} row {number}")


class CsvReader:
    """Reads a CSV file with a header line; every value is text."""

    def __init__(self, options: NoOptions) -> None:
        del options

    def rows(self, path: str, split: str | None) -> Iterator[LocatedRow]:
        del split
        raw = Path(path).read_bytes()
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"Data file '{path}': {_not_utf8(error, raw, 0)}") from error
        rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                raise DataError(f"Data file '{path}' line {rows.line_num}: not valid CSV: {error}.") from error
            place = f"{path} line {rows.line_num}"
            if None in row or None in row.values():
                columns = len(rows.fieldnames or ())
                yield LocatedRow(place, error=f"has another number of values than the header's {columns} columns")
            else:
                yield LocatedRow(place, row)


def _json_row(line: str, place: str) -> LocatedRow:
    try:
        row = json.loads(line)
        if "\\ud" in line.lower():  # an escape such as \\ud83d needs its other half to be a character
            json.dumps(row, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        return LocatedRow(place, error=f"not valid JSON ({error.msg} at column {error.colno}): {_excerpt(line)}")
    except UnicodeEncodeError:
        return LocatedRow(place, error="holds half of a surrogate pair (\\ud800 to \\udfff), which is no character")
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number of thousands of digits
        return LocatedRow(place, error=f"JSON that cannot be read ({error}): {_excerpt(line)}")
    return _object_row(row, place)


def _object_row(row: Any, place: str) -> LocatedRow:
    if not isinstance(row, dict):
        return LocatedRow(
            place, error=f"a row must be a JSON object, this is a {type(row).__name__}: {row!r:.{_EXCERPT}}"
        )
    return LocatedRow(place, row)


def _not_utf8(error: UnicodeDecodeError, raw: bytes, start: int) -> str:
    return (
        f"not UTF-8: byte 0x{raw[error.start]:02x} at offset {start + error.start} of the file. "
        "Convert the file to UTF-8"
    )


def _excerpt(line: str) -> str:
    return line if len(line) <= _EXCERPT else line[:_EXCERPT] + "..."
