"""Values that the driver and its workers exchange by reference: files, which readers map into their memory."""

from __future__ import annotations

import itertools
import mmap
import os
import pickle
import struct
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chatlearn_workers.rpc import StoredValueLostError

_LENGTH = struct.Struct("!Q")


class FileReference:
    """A value in a ``FileStore``. The object that made it removes the file when it goes; its copies do not."""

    __slots__ = ("__weakref__", "path")

    def __init__(self, path: str) -> None:
        self.path = path

    @staticmethod
    def owned(path: Path) -> FileReference:
        """Make the reference whose end is the end of the value."""
        reference = FileReference(str(path))
        weakref.finalize(reference, path.unlink, missing_ok=True)
        return reference

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FileReference) and other.path == self.path

    def __hash__(self) -> int:
        return hash(self.path)

    def __reduce__(self) -> tuple[Any, ...]:
        return FileReference, (self.path,)


class FileStore:
    """Implements ``chatlearn_workers.rpc.ObjectStore``: a file a value, with its pickle and then its arrays."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._numbers = itertools.count()

    def __reduce__(self) -> tuple[Any, ...]:
        return FileStore, (self.directory,)

    def reserve(self) -> FileReference:
        """Make a reference for a value that a worker will write."""
        return FileReference.owned(self.directory / f"{os.getpid()}-{next(self._numbers)}")

    def put(self, value: Any) -> FileReference:
        """See ``ObjectStore``."""
        reference = self.reserve()
        write_value(reference, value)
        return reference

    def get(self, references: Sequence[FileReference], timeout_s: float) -> list[Any]:
        """See ``ObjectStore``. A value is whole as soon as its file is there."""
        return [read_value(reference) for reference in references]


def write_value(reference: FileReference, value: Any) -> None:
    """Write a value; readers see the whole of it or nothing."""
    buffers: list[pickle.PickleBuffer] = []
    content = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    raw = [buffer.raw() for buffer in buffers]
    partial = Path(f"{reference.path}.partial")
    with partial.open("wb") as file:
        header = pickle.dumps([len(content), *(part.nbytes for part in raw)])
        for part in (_LENGTH.pack(len(header)), header, content, *raw):
            file.write(part)
    partial.replace(reference.path)


def read_value(reference: FileReference) -> Any:
    """Read a value; its arrays are read-only views of the file.

    Raises:
        StoredValueLostError: the file is gone.
    """
    try:
        with Path(reference.path).open("rb") as file:
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        raise StoredValueLostError(f"{reference.path} is not there") from None
    (size,) = _LENGTH.unpack(view[: _LENGTH.size])
    at = _LENGTH.size + size
    parts = []
    for length in pickle.loads(view[_LENGTH.size : at]):
        parts.append(view[at : at + length])
        at += length
    return pickle.loads(parts[0], buffers=parts[1:])
