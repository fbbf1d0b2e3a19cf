"""Writes files of a run so that they survive storage failures and processes killed in the middle of a write.

A file that is replaced is complete before and after. A file that grows holds complete lines of JSON, and at most one
broken line for each failed write, which readers detect and skip.
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
"""Characters that JSON allows in a string, but that control terminals or end lines in some readers."""


@dataclass(slots=True, frozen=True)
class Line:
    """A complete line of a file, and its content."""

    number: int
    """Line number, from 1."""
    record: dict[str, Any]
    content: bytes
    """Bytes of the line, with its newline."""


def json_line(record: Mapping[str, Any], indent: int | None = None) -> bytes:
    """One line of JSON in UTF-8, or several with ``indent``. Characters that UTF-8 cannot encode are escaped."""
    text = json.dumps(record, ensure_ascii=False, default=str, indent=indent)
    text = _UNESCAPED.sub(lambda match: f"\\u{ord(match.group()):04x}", text)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def append_lines(file: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append lines to a file. On failure the file is restored as far as the storage allows.

    Raises:
        OSError: the lines were not written.
    """
    content = b"".join(json_line(record) for record in records)
    with file.open("a+b", buffering=0) as stream:
        assert isinstance(stream, FileIO)
        size = stream.seek(0, os.SEEK_END)
        if size and os.pread(stream.fileno(), 1, size - 1) != b"\n":
            content = b"\n" + content  # terminates the broken line that a killed process left
        left = memoryview(content)
        try:
            while left:
                left = left[stream.write(left) :]
        except OSError:
            with suppress(OSError):
                stream.truncate(size)
            raise


def read_lines(file: Path) -> tuple[list[Line], list[int]]:
    """The complete lines of a file, each a JSON object, and the numbers of broken lines, from 1.

    A line without its newline is broken. A file that does not exist has no lines.

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
    """Replace a file atomically.

    Args:
        durable: whether the content is on disk, safe from a power failure, when this returns.

    Raises:
        OSError: the file was not written; the old one is unchanged.
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
    """The path to which ``replace_file`` writes before renaming."""
    return file.with_name(f".{file.name}.tmp")


def is_temporary(file: Path) -> bool:
    """Whether the file is a leftover of ``replace_file`` in a killed process."""
    return file.name.startswith(".") and file.name.endswith(".tmp")


def file_facts(directory: Path, names: Iterable[str]) -> dict[str, FileFacts]:
    """Flush these files of a directory to disk; returns their sizes and checksums by name. Raises OSError."""
    facts: dict[str, FileFacts] = {}
    for name in names:
        path = directory / name
        make_durable(path)
        facts[name] = FileFacts(path.stat().st_size, sha256_of(path))
    return facts


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, 64 hexadecimal digits. Raises OSError."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def make_durable(path: Path) -> None:
    """Flush a file or directory to disk, so that it survives a power failure. Raises OSError."""
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
