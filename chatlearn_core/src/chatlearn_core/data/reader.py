"""Reads rows of files: JSON Lines, JSON and CSV itself, other formats through readers that plugins register."""

from __future__ import annotations

import csv
import difflib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from chatlearn_core.data.format import Row
from chatlearn_core.exceptions import DataError

_EXCERPT = 60
"""Number of characters of a malformed line that an error shows."""
_SPLITS = ("train", "test", "valid", "dev", "eval")
"""Prefixes of file names that indicate a split."""


class RowReader(Protocol):
    """Reads one kind of file, or hub datasets. Built as ``factory(options)`` from a ``DatasetSpec`` with ``reads``."""

    def rows(self, path: str, split: str | None) -> Iterator[Row]:
        """Rows in stored order. ``split`` selects a split of a hub dataset; readers of files ignore it.

        Raises:
            DataError: the file or dataset cannot be read.
        """


@dataclass(slots=True, frozen=True)
class LocatedRow:
    """A row and its place, or the error that makes it unusable."""

    place: str
    """For messages: ``train.jsonl line 3``, ``train.parquet row 3``."""
    row: Row | None = None
    error: str | None = None


def read_rows(path: str, split: str | None, readers: Mapping[str, Callable[[], RowReader]]) -> Iterator[LocatedRow]:
    """Rows of a file, of every data file below a directory (sorted by path), or of a hub dataset.

    A line without a valid row (malformed JSON, not UTF-8, not an object) is yielded with its error; reading continues.

    Args:
        path: a file, a directory, or a hub id ``owner/name``, with a configuration ``owner/name:main``.
        split: split of a hub dataset; for a directory, only files whose names begin with it are read.
        readers: file suffix, or ``hub`` -> function that builds the reader.

    Raises:
        DataError: the path does not exist, or no reader supports it.
    """
    source = Path(path).expanduser()
    if source.is_dir():
        for file in _data_files(source, split, readers):
            yield from _file_rows(file, readers)
    elif source.exists():
        yield from _file_rows(source, readers)
    elif _looks_like_hub_id(path, readers):
        if "hub" not in readers:
            raise DataError(
                f"Dataset '{path}' is no local file, and no installed plugin reads hub datasets.\n"
                "  Give the path of a local file, or install chatlearn-data."
            )
        name = f"{path}:{split}" if split else path
        yield from _numbered(readers["hub"]().rows(path, split), name)
    else:
        raise DataError(_missing(source))


def _looks_like_hub_id(path: str, readers: Mapping[str, object]) -> bool:
    """Whether ``path``, which does not exist locally, has the form ``owner/name``."""
    parts = path.split("/")
    is_file = Path(path).suffix.lower() in _readable(readers)
    return len(parts) == 2 and all(parts) and not path.startswith((".", "~")) and not is_file


def _readable(readers: Mapping[str, object]) -> list[str]:
    return sorted({*_TEXT_READERS, *(suffix for suffix in readers if suffix.startswith("."))})


def _missing(source: Path) -> str:
    lines = [f"Data file '{source}' does not exist (looked in {source.absolute().parent})."]
    names = [file.name for file in source.parent.iterdir()] if source.parent.is_dir() else []
    if near := difflib.get_close_matches(source.name, names, n=1):
        lines.append(f"  Did you mean '{source.parent / near[0]}'?")
    elif not source.parent.is_dir():
        lines.append(f"  The directory '{source.parent}' does not exist either.")
    lines.append("  Give a path that exists, relative to where you are or absolute.")
    return "\n".join(lines)


def _data_files(directory: Path, split: str | None, readers: Mapping[str, object]) -> list[Path]:
    files = [
        file
        for file in sorted(directory.rglob("*"))
        if file.is_file()
        and file.suffix.lower() in _readable(readers)
        and not any(part.startswith(".") for part in file.relative_to(directory).parts)
    ]
    if not files:
        raise DataError(f"Directory '{directory}' holds no data file ({', '.join(_readable(readers))}).")
    splits = sorted({name for name in _SPLITS for file in files if file.name.startswith(name)})
    if split is None and len(splits) > 1:
        raise DataError(
            f"Directory '{directory}' holds several splits ({', '.join(splits)}).\n"
            "  Set the dataset's split to one of them, or its path to one file, so that they are not mixed by accident."
        )
    chosen = [file for file in files if split is None or file.name.startswith(split)]
    if not chosen:
        names = ", ".join(file.name for file in files[:10])
        raise DataError(f"No file below '{directory}' has a name that begins with split '{split}'; there are: {names}.")
    return chosen


def _file_rows(file: Path, readers: Mapping[str, Callable[[], RowReader]]) -> Iterator[LocatedRow]:
    suffix = file.suffix.lower()
    try:
        if suffix in _TEXT_READERS:
            yield from _TEXT_READERS[suffix](file)
        elif suffix in readers:
            yield from _numbered(readers[suffix]().rows(str(file), None), str(file))
        else:
            raise DataError(
                f"Data file '{file}' has the suffix '{suffix}', which nothing installed reads.\n"
                f"  Readable: {', '.join(_readable(readers))}."
                + (" Parquet needs chatlearn-data installed." if suffix == ".parquet" else "")
            )
    except OSError as error:
        raise DataError(f"Data file '{file}' cannot be read: {error.strerror or error}.") from error


def _numbered(rows: Iterator[Row], name: str) -> Iterator[LocatedRow]:
    for number, row in enumerate(rows, start=1):
        yield LocatedRow(f"{name} row {number}", row)


def _read_json_lines(file: Path) -> Iterator[LocatedRow]:
    """Rows of a JSON Lines file, streamed. Blank lines and a byte-order mark are skipped."""
    offset = 0
    with file.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            place = f"{file} line {number}"
            start, offset = offset, offset + len(raw)
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                yield LocatedRow(place, error=_not_utf8(error, raw, start))
                continue
            if line:
                yield _json_row(line, place)


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


def _read_json(file: Path) -> Iterator[LocatedRow]:
    """Rows of a JSON file: an array of objects, or JSON Lines under that suffix, as often published."""
    raw = file.read_bytes()
    if raw.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] != b"[":
        yield from _read_json_lines(file)
        return
    try:
        rows = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"Data file '{file}': {_not_utf8(error, raw, 0)}") from error
    except json.JSONDecodeError as error:
        line = raw.decode("utf-8-sig").split("\n")[error.lineno - 1]
        raise DataError(
            f"Data file '{file}' line {error.lineno}: not valid JSON "
            f"({error.msg} at column {error.colno}): {_excerpt(line)}"
        ) from error
    except (RecursionError, ValueError) as error:
        raise DataError(f"Data file '{file}' is JSON that cannot be read: {error}.") from error
    for number, row in enumerate(rows, start=1):
        yield _object_row(row, f"{file} row {number}")


def _read_csv(file: Path) -> Iterator[LocatedRow]:
    """Rows of a CSV file with a header line; every value is text."""
    raw = file.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"Data file '{file}': {_not_utf8(error, raw, 0)}") from error
    rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(f"Data file '{file}' line {rows.line_num}: not valid CSV: {error}.") from error
        place = f"{file} line {rows.line_num}"
        if None in row or None in row.values():
            columns = len(rows.fieldnames or ())
            yield LocatedRow(place, error=f"has another number of values than the header's {columns} columns")
        else:
            yield LocatedRow(place, row)


def _not_utf8(error: UnicodeDecodeError, raw: bytes, start: int) -> str:
    return (
        f"not UTF-8: byte 0x{raw[error.start]:02x} at offset {start + error.start} of the file. "
        "Convert the file to UTF-8"
    )


def _excerpt(line: str) -> str:
    return line if len(line) <= _EXCERPT else line[:_EXCERPT] + "..."


_TEXT_READERS: dict[str, Callable[[Path], Iterator[LocatedRow]]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
}
