"""Reads rows of files and hub datasets through the readers that plugins register."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from chatlearn_core.data.format import Row
from chatlearn_core.exceptions import DataError

_FILES_OF_CHATLEARN_DATA = (".csv", ".json", ".jsonl", ".parquet")
_SPLITS = ("train", "test", "valid", "dev", "eval")
"""Prefixes of file names that indicate a split."""


@dataclass(slots=True, frozen=True)
class LocatedRow:
    """A row and its place, or the error that makes it unusable."""

    place: str
    """For messages: ``train.jsonl line 3``, ``train.parquet row 3``."""
    row: Row | None = None
    error: str | None = None


class RowReader(Protocol):
    """Reads one kind of file, or hub datasets. Built as ``factory(options)`` from a ``DatasetSpec`` with ``reads``."""

    def rows(self, path: str, split: str | None) -> Iterator[Row | LocatedRow]:
        """Rows in stored order, plain or located; messages give plain ones their number as place.

        A reader that can continue after a row which it cannot use yields a ``LocatedRow`` with the error.

        Called: when a run reads its data; in the driver; once per file.

        Args:
            path: a file; for a reader of ``hub``, the id of a dataset.
            split: split of a hub dataset; readers of files ignore it.

        Raises:
            DataError: the file or dataset cannot be read.
        """


def read_rows(path: str, split: str | None, readers: Mapping[str, Callable[[], RowReader]]) -> Iterator[LocatedRow]:
    """Rows of a file, of every data file below a directory (sorted by path), or of a hub dataset.

    A row that its reader cannot use is yielded with its error; reading continues.

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
    is_file = Path(path).suffix.lower() in {*_FILES_OF_CHATLEARN_DATA, *readers}
    return len(parts) == 2 and all(parts) and not path.startswith((".", "~")) and not is_file


def _readable(readers: Mapping[str, object]) -> list[str]:
    return sorted(suffix for suffix in readers if suffix.startswith("."))


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
        if suffix not in readers:
            raise DataError(
                f"Data file '{file}' has the suffix '{suffix}', which nothing installed reads.\n"
                f"  Readable: {', '.join(_readable(readers)) or 'no file'}."
                + (" Install chatlearn-data, which reads it." if suffix in _FILES_OF_CHATLEARN_DATA else "")
            )
        yield from _numbered(readers[suffix]().rows(str(file), None), str(file))
    except OSError as error:
        raise DataError(f"Data file '{file}' cannot be read: {error.strerror or error}.") from error


def _numbered(rows: Iterator[Row | LocatedRow], name: str) -> Iterator[LocatedRow]:
    for number, row in enumerate(rows, start=1):
        yield row if isinstance(row, LocatedRow) else LocatedRow(f"{name} row {number}", row)
