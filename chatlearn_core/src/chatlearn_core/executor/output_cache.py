"""What frozen models computed of samples that the data hold, on disk: once for a run, however often it resumes.

One SQLite file in the run's directory. An entry's key is a checksum of everything that it depends on: the model's
configuration and weights, its backend and options, what was asked for, and the sample's tokens and loss mask. So an
entry of other content is never found, and nothing has to be removed when data or models change.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from chatlearn_core.exceptions import CheckpointError, DataError, ModelError
from chatlearn_core.metrics.durable_files import sha256_of
from chatlearn_core.plugins.records import TrainerSpec
from chatlearn_core.runtime.plan import RolePlan
from chatlearn_core.types import OutputRequest, Sample

FILE = "output_cache.sqlite3"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".json")
"""Files of a model directory that say what it computes; of ``.json`` its configurations and indices."""
Arrays = Mapping[str, npt.NDArray[Any]]


class OutputCache:
    """The file. Opened when it is first used; one process at a time, which the run directory's lock sees to.

    Args:
        directory: of the run.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE
        self._connection: sqlite3.Connection | None = None

    def read(self, key: bytes) -> dict[str, npt.NDArray[Any]] | None:
        """Output -> [T, ...] array, or [] of a number for the sequence; None if there is no such entry.

        Raises:
            CheckpointError: the file cannot be read, or is damaged.
        """
        try:
            rows = self._open().execute("SELECT name, dtype, shape, data FROM outputs WHERE key = ?", (key,)).fetchall()
            return {name: _array(dtype, shape, data) for name, dtype, shape, data in rows} or None
        except (sqlite3.Error, ValueError, TypeError) as error:
            raise self._damaged(error) from error

    def missing(self, keys: Iterable[bytes]) -> set[bytes]:
        """Those of the keys that have no entry."""
        try:
            connection = self._open()
            return {
                key
                for key in set(keys)
                if connection.execute("SELECT 1 FROM outputs WHERE key = ? LIMIT 1", (key,)).fetchone() is None
            }
        except sqlite3.Error as error:
            raise self._damaged(error) from error

    def write(self, entries: Mapping[bytes, Arrays]) -> None:
        """Add entries, all of them or none: what a process that is killed has not finished is made again."""
        rows = [
            (key, name, array.dtype.str, json.dumps(array.shape), np.ascontiguousarray(array).tobytes())
            for key, arrays in entries.items()
            for name, array in arrays.items()
        ]
        try:
            with self._open() as connection:
                connection.executemany("INSERT OR REPLACE INTO outputs VALUES (?, ?, ?, ?, ?)", rows)
        except sqlite3.Error as error:
            raise self._damaged(error) from error

    def file_checksum(self, file: Path) -> str:
        """SHA-256 of a file; remembered as long as neither its size nor its time of change differs.

        Raises:
            OSError: the file cannot be read.
        """
        facts = file.stat()
        name, stamp = str(file.resolve()), f"{facts.st_size} {facts.st_mtime_ns} {facts.st_ctime_ns}"
        try:
            connection = self._open()
            known = connection.execute("SELECT stamp, sha256 FROM files WHERE path = ?", (name,)).fetchone()
            if known is not None and known[0] == stamp:
                return str(known[1])
            checksum = sha256_of(file)
            with connection:
                connection.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?)", (name, stamp, checksum))
        except sqlite3.Error as error:
            raise self._damaged(error) from error
        return checksum

    def close(self) -> None:
        """Close the file."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            # Calls are carried out on the event loop's thread or on one of its workers, one at a time.
            connection = sqlite3.connect(self.path, check_same_thread=False)
            with connection:
                connection.execute(
                    "CREATE TABLE IF NOT EXISTS outputs (key BLOB, name TEXT, dtype TEXT, shape TEXT, data BLOB, "
                    "PRIMARY KEY (key, name)) WITHOUT ROWID"
                )
                connection.execute("CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, stamp TEXT, sha256 TEXT)")
            self._connection = connection
        return self._connection

    def _damaged(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self.path}, which keeps what frozen models computed, cannot be used: {type(error).__name__}: {error}. "
            "Free space on the disk if it is full; otherwise delete the file: its content is computed again"
        )


def _array(dtype: str, shape: str, data: bytes) -> npt.NDArray[Any]:
    return np.frombuffer(data, dtype=np.dtype(dtype)).reshape(json.loads(shape)).copy()


def model_identity(cache: OutputCache, role: RolePlan) -> bytes:
    """A checksum of what a frozen role computes with: weights and configuration of its model directory, its head,
    backend, and the options that are no matter of layout.

    Args:
        cache: remembers the checksums of files.

    Raises:
        ModelError: a file of the directory cannot be read.
    """
    assert role.model is not None, "a trainer has a model"
    directory = Path(role.model.path)
    record = role.backend.record
    assert isinstance(record, TrainerSpec)
    layout = set(record.layout_options)
    options = {
        name: value for name, value in role.backend.options.model_dump(mode="json").items() if name not in layout
    }
    files = sorted(file for file in directory.iterdir() if file.suffix in WEIGHTS and file.is_file())
    try:
        checksums = {file.name: cache.file_checksum(file) for file in files}
    except OSError as error:
        raise ModelError(f"roles.{role.name}: a file of {directory} cannot be read: {error}") from error
    content = {
        "files": checksums,
        "backend": record.name,
        "options": options,
        "engine": dict(role.engine),
        "head": role.head,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).digest()


def entry_key(model: bytes, asked: OutputRequest, sample: Sample) -> bytes:
    """A checksum of the model, what is asked of it, and the sample's content. The sample's id does not count.

    Raises:
        DataError: the sample has media by reference.
    """
    request = [sorted(asked.names), asked.temperature, sorted(asked.arguments.items())]
    digest = hashlib.sha256(model + json.dumps(request).encode() + b"\0")
    tokens = np.asarray(sample.token_ids, dtype="<i8")
    digest.update(len(tokens).to_bytes(8, "little") + tokens.tobytes())
    digest.update(np.packbits(np.asarray(sample.loss_mask, dtype=np.bool_)).tobytes())
    for media in sample.media:
        content = media.content
        if not isinstance(content, bytes | np.ndarray):
            raise DataError(
                f"sample {sample.id!r} has a {media.kind} that is a {type(content).__name__}: results are kept by "
                "content, and what a path or URL names may change. Set algorithm.options.cache_reference to false"
            )
        data = content if isinstance(content, bytes) else np.ascontiguousarray(content).tobytes()
        digest.update(json.dumps([media.kind, len(data), str(getattr(content, "shape", ""))]).encode() + data)
    return digest.digest()
