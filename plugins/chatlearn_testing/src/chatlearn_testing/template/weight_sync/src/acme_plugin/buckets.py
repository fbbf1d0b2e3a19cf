"""The files through which both ends communicate: their directory, names and contents.

In ``{workspace}/{sync_id}`` each sender rank writes numbered buckets, whose names contain a checksum, and then an end
marker with the number of buckets, or a failure marker with the reason. A file gets its name only once it is complete.
"""

from __future__ import annotations

import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_core.types import WeightManifest
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

Bucket = dict[str, Tensor]
"""Checkpoint name -> whole tensor on the host."""

COPIES = 4
"""Number of copies of a bucket in memory at a time: its tensors and its bytes, at the sender and at the receiver."""


@dataclass(slots=True, frozen=True)
class FilesOffer:
    """The data that a sender publishes about one sync."""

    directory: str
    """The directory where the files will be."""


class RankFiles:
    """The files of one sender rank in one sync."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.directory = directory
        self._prefix = f"rank-{rank:05d}"
        self.end = self.directory / f"{self._prefix}.end"
        self.failed = self.directory / f"{self._prefix}.failed"

    def publish_bucket(self, number: int, bucket: Bucket) -> None:
        """Write a bucket atomically."""
        content = save(bucket)
        self.publish(self.directory / f"{self._prefix}-{number:06d}-{zlib.crc32(content):08x}.bucket", content)

    def publish(self, path: Path, content: bytes) -> None:
        """Write under a temporary name and rename, because a receiver reads any file with a final name."""
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_bytes(content)
        unfinished.rename(path)

    def bucket(self, number: int) -> Path | None:
        """Return the path of a bucket; None if it has not been written yet."""
        return next(self.directory.glob(f"{self._prefix}-{number:06d}-*.bucket"), None)

    def clear(self) -> None:
        """Delete this rank's files."""
        for path in self.directory.glob(f"{self._prefix}*"):
            path.unlink()

    def remove(self) -> None:
        """Delete this rank's files, and the directory with the last of them."""
        self.clear()
        if self.directory.exists() and not any(self.directory.iterdir()):
            with suppress(FileNotFoundError):  # another rank removed it at the same moment
                self.directory.rmdir()


def read_bucket(path: Path) -> Bucket:
    """Read a bucket and compare its checksum.

    Raises:
        WeightSyncError: the file cannot be read, or differs from what the sender wrote; names it.
    """
    written = path.stem.rsplit("-", 1)[-1]
    try:
        content = path.read_bytes()
        if f"{zlib.crc32(content):08x}" != written:
            raise WeightSyncError(
                f"{path}: its checksum is {zlib.crc32(content):08x}, the sender wrote {written}; the file was changed "
                "or damaged. Check the disk of the workspace"
            )
        bucket: Bucket = load(content)
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(f"{path} cannot be read: {error}") from error
    return bucket


def check_tensor(name: str, tensor: Tensor, manifest: WeightManifest, where: str) -> None:
    """Compare one tensor with the manifest of the sync.

    Raises:
        WeightSyncError: the name is unknown, or shape or dtype differ; names the tensor.
    """
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    promised = manifest.tensors.get(manifest.aliases.get(name, name))
    if promised is None or (promised.shape, promised.dtype) != (shape, dtype):
        has = f"{list(promised.shape)} {promised.dtype}" if promised else "no tensor of that name"
        raise WeightSyncError(f"{where}: tensor {name!r} is {list(shape)} {dtype}, the manifest of the sync has {has}")
