"""Files of a run that survive what storage does: writes that fail half-way, processes killed in the middle of a line.

A file that is replaced is whole, before and after. A file that grows holds whole lines of JSON, and at most one broken
one for each write that failed, which readers find and leave out.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from chatlearn_core.types.file_facts import FileFacts

_UNESCAPED = re.compile("[\x7f-\x9f\u2028\u2029]")
"""What JSON allows in a string, and terminals obey or readers take for the end of a line."""


@dataclass(slots=True, frozen=True)
class Line:
    """A whole line of a file, and what it says."""

    number: int
    """From 1."""
    record: dict[str, Any]
    content: bytes
    """With its newline."""


def json_line(record: Mapping[str, Any], indent: int | None = None) -> bytes:
    """One line of JSON in UTF-8, or with ``indent`` several. What UTF-8 cannot hold is written as its JSON escape."""
    text = json.dumps(record, ensure_ascii=False, default=str, indent=indent)
    text = _UNESCAPED.sub(lambda match: f"\\u{ord(match.group()):04x}", text)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def append_lines(file: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Add lines to a file. If that fails, the file is what it was, as far as the storage lets it.

    Raises:
        OSError: the lines are not written.
    """
    content = b"".join(json_line(record) for record in records)
    with file.open("a+b", buffering=0) as stream:
        assert isinstance(stream, FileIO)
        size = stream.seek(0, os.SEEK_END)
        if size and os.pread(stream.fileno(), 1, size - 1) != b"\n":
            content = b"\n" + content  # an earlier process was killed in the middle of a line: it keeps that to itself
        left = memoryview(content)
        try:
            while left:
                left = left[stream.write(left) :]
        except OSError:
            with suppress(OSError):
                stream.truncate(size)
            raise


def read_lines(file: Path) -> tuple[list[Line], list[int]]:
    """The whole lines of a file, each a JSON object, and the numbers of the others, from 1.

    A line without its newline is not whole. A file that does not exist has no lines.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return [], []
    *ended, rest = content.split(b"\n")
    whole: list[Line] = []
    broken: list[int] = []
    for number, text in enumerate(ended, 1):
        record = _object(text)
        if record is not None:
            whole.append(Line(number, record, text + b"\n"))
        elif text:
            broken.append(number)
    if rest:
        broken.append(len(ended) + 1)
    return whole, broken


def replace_file(file: Path, content: bytes, *, durable: bool = True) -> None:
    """Write a file as a whole or not at all.

    Args:
        durable: whether it is on the disk when this returns, also if the machine's power fails then.

    Raises:
        OSError: it is not written; an earlier one is as it was.
    """
    temporary = temporary_name(file)
    try:
        with temporary.open("wb") as stream:
            stream.write(content)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        temporary.replace(file)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def temporary_name(file: Path) -> Path:
    """Where ``replace_file`` writes before it renames."""
    return file.with_name(f".{file.name}.tmp")


def is_temporary(file: Path) -> bool:
    """Whether ``replace_file`` of a process that was killed left this file."""
    return file.name.startswith(".") and file.name.endswith(".tmp")


def file_facts(directory: Path, names: Iterable[str]) -> dict[str, FileFacts]:
    """Have these files of a directory on the disk; their sizes and checksums by name. Raises OSError."""
    facts: dict[str, FileFacts] = {}
    for name in names:
        path = directory / name
        make_durable(path)
        facts[name] = FileFacts(path.stat().st_size, sha256_of(path))
    return facts


def sha256_of(path: Path) -> str:
    """Of a file's contents, 64 hexadecimal digits. Raises OSError."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def make_durable(path: Path) -> None:
    """Have a file or directory on the disk, also if the machine's power fails. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):  # JSON or UTF-8
        return None
    return record if isinstance(record, dict) else None
