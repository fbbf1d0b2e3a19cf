"""A directory of safetensors files with an index that describes and checksums their contents.

The layout is that of a Hugging Face checkpoint (``model.safetensors.index.json`` and the files it names), so any engine
that reads those can load it. ``chatlearn_weights.json`` is written last. It holds the policy version, every tensor's
shape, dtype and CRC-32, and every file's size and header CRC-32.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_core.types import Box, TensorSpec, WeightManifest, WeightShard
from chatlearn_core.types.boxes import box_text
from chatlearn_sync.shard_spec import dtype_name, whole_shard
from chatlearn_sync.stream import Bucket, name_list

INDEX_NAME = "chatlearn_weights.json"
HUGGING_FACE_INDEX_NAME = "model.safetensors.index.json"
INDEX_FORMAT = 2
HEADER_LENGTH_BYTES = 8
"""Size of the little-endian integer at the start of a safetensors file that gives the length of its JSON header."""
READ_BYTES = 4 << 20
READERS = 4
"""Threads that checksum the tensors of a file, each with ``READ_BYTES`` in memory."""


@dataclass(slots=True, frozen=True)
class FileEntry:
    """One safetensors file."""

    num_bytes: int
    header_crc32: int


@dataclass(slots=True, frozen=True)
class TensorEntry:
    """One tensor and the file it is in."""

    file: str
    shape: tuple[int, ...]
    dtype: str
    crc32: int


@dataclass(slots=True, frozen=True)
class BoxEntry:
    """A stored box: the tensor it belongs to, that tensor's shape, and the box's place in it."""

    name: str
    global_shape: tuple[int, ...]
    box: Box


@dataclass(slots=True, frozen=True)
class WeightIndex:
    """Description of the files that one rank, or all ranks together, wrote for one sync."""

    sync_id: str
    policy_version: int
    role: str
    """The trainer role that the weights come from."""
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    """Stored name -> entry; the stored name is the tensor's name, or that of a box (``boxes``)."""
    aliases: Mapping[str, str]
    base: str | None = None
    """Sync id of the version that a delta applies to; None for a full version. A delta's ``tensors`` hold changes."""
    streamed: tuple[str, ...] = ()
    """Names of the tensors that the writer of a delta compared, changed or not."""
    results: Mapping[str, int] = field(default_factory=dict)
    """Name of each changed tensor -> checksum of the whole tensor after the delta is applied."""
    boxes: Mapping[str, BoxEntry] = field(default_factory=dict)
    """Stored name -> box, for stored tensors that are boxes."""

    @property
    def num_bytes(self) -> int:
        """Total size of the files, bytes."""
        return sum(entry.num_bytes for entry in self.files.values())

    def manifest(self) -> WeightManifest:
        """Return the manifest of the tensors in the files, whether stored whole or in boxes."""
        specs: dict[str, TensorSpec] = {}
        for stored, entry in self.tensors.items():
            box = self.boxes.get(stored)
            name, shape = (stored, entry.shape) if box is None else (box.name, box.global_shape)
            specs[name] = TensorSpec(name, shape, entry.dtype)
        return WeightManifest(specs, self.aliases)

    def shard(self, stored: str, tensor: Tensor) -> WeightShard:
        """Return a stored tensor as the shard that was streamed."""
        box = self.boxes.get(stored)
        if box is None:
            return whole_shard(stored, tensor)
        return WeightShard(box.name, box.global_shape, box.box, 0, tensor)


def stored_parts(bucket: Bucket) -> tuple[list[tuple[str, Tensor]], dict[str, BoxEntry]]:
    """Return (stored name, tensor) of each shard of a bucket, and stored name -> entry of those that are boxes."""
    parts: list[tuple[str, Tensor]] = []
    boxes: dict[str, BoxEntry] = {}
    for shard in bucket:
        stored = shard.name
        if not shard.is_whole:
            stored = f"{shard.name}{box_text(shard.box)}"
            boxes[stored] = BoxEntry(shard.name, shard.global_shape, shard.box)
        parts.append((stored, shard.tensor))
    return parts, boxes


def write_shard(path: Path, parts: Sequence[tuple[str, Tensor]]) -> tuple[FileEntry, dict[str, TensorEntry]]:
    """Write one safetensors file and flush it to the disk.

    Raises:
        WeightSyncError: the disk is full, read-only or gone; names the path.
    """
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in parts:
        host = tensor.detach().to("cpu").contiguous()
        if host.data_ptr() in storages:  # safetensors refuses two names for one memory (a tied alias that was streamed)
            host = host.clone()
        storages.add(host.data_ptr())
        tensors[name] = host
    with ThreadPoolExecutor(1, thread_name_prefix="checksums") as pool:
        entries = pool.submit(_tensor_entries, path.name, tensors)  # while the disk writes
        try:
            save_file(tensors, path, metadata={"format": "pt"})
            with path.open("rb") as file:
                os.fsync(file.fileno())
                header, _ = _read_header(file.read(HEADER_LENGTH_BYTES), file.read, path)
                num_bytes = os.fstat(file.fileno()).st_size
        except (OSError, SafetensorError) as error:
            raise write_error(path, error) from error
        return FileEntry(num_bytes, zlib.crc32(header)), entries.result()


def _tensor_entries(file: str, tensors: Mapping[str, Tensor]) -> dict[str, TensorEntry]:
    return {
        name: TensorEntry(file, tuple(tensor.shape), dtype_name(tensor), tensor_crc32(tensor))
        for name, tensor in tensors.items()
    }


def tensor_crc32(tensor: Tensor) -> int:
    """Return the CRC-32 of a contiguous host tensor's bytes."""
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data)


def write_index(directory: Path, index: WeightIndex, name: str = INDEX_NAME) -> None:
    """Write the index atomically.

    Raises:
        WeightSyncError: the disk is full, read-only or gone; names the path.
    """
    _write_json(directory / name, {"format": INDEX_FORMAT, **asdict(index)})


def write_hugging_face_index(directory: Path, index: WeightIndex) -> None:
    """Write the ``model.safetensors.index.json`` that engines read."""
    size = sum(_tensor_bytes(entry) for entry in index.tensors.values())
    content = {"metadata": {"total_size": size}, "weight_map": {n: entry.file for n, entry in index.tensors.items()}}
    _write_json(directory / HUGGING_FACE_INDEX_NAME, content)


def read_index(directory: Path, name: str = INDEX_NAME) -> WeightIndex:
    """Read an index that ``write_index`` wrote.

    Raises:
        WeightSyncError: the file is missing, is not an index, or has another format; names the path.
    """
    path = directory / name
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        if content.pop("format") != INDEX_FORMAT:
            raise WeightSyncError(
                f"{path}: its format is not {INDEX_FORMAT}; install the same version of chatlearn-sync at both ends"
            )
        content["files"] = {file: FileEntry(**entry) for file, entry in content["files"].items()}
        content["tensors"] = {
            name: TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for name, entry in content["tensors"].items()
        }
        content["streamed"] = tuple(content["streamed"])
        content["boxes"] = {
            name: BoxEntry(box["name"], tuple(box["global_shape"]), tuple((a, b) for a, b in box["box"]))
            for name, box in content["boxes"].items()
        }
        return WeightIndex(**content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightSyncError(f"{path}: not a readable weight index ({type(error).__name__}: {error})") from error


def merge_indexes(parts: Iterable[WeightIndex]) -> WeightIndex:
    """Merge the indexes of all ranks.

    Raises:
        WeightSyncError: two ranks wrote the same tensor.
    """
    first, *rest = parts
    files, tensors = dict(first.files), dict(first.tensors)
    streamed, results, boxes = list(first.streamed), dict(first.results), dict(first.boxes)
    for part in rest:
        twice = sorted(tensors.keys() & part.tensors.keys())
        if twice:
            raise WeightSyncError(f"two ranks streamed the same tensors: {name_list(twice)}")
        files.update(part.files)
        tensors.update(part.tensors)
        streamed += part.streamed
        results.update(part.results)
        boxes.update(part.boxes)
    return WeightIndex(
        first.sync_id,
        first.policy_version,
        first.role,
        files,
        tensors,
        first.aliases,
        streamed=tuple(streamed),
        results=results,
        boxes=boxes,
    )


def verify_files(directory: Path, index: WeightIndex, *, checksums: bool) -> None:
    """Compare the files with the index: always their sizes, and the CRC-32 of headers and tensors if ``checksums``.

    Raises:
        WeightSyncError: a file differs or cannot be read; names it, and the corrupted tensor.
    """
    for name, entry in index.files.items():
        path = directory / name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise WeightSyncError(f"{path}: in the index, but cannot be read ({error})") from error
        if size != entry.num_bytes:
            word = "cut short" if size < entry.num_bytes else "too long"
            raise WeightSyncError(f"{path}: {word}: it has {size} bytes, the index says {entry.num_bytes}")
        if checksums:
            _verify_file(path, entry, {n: e for n, e in index.tensors.items() if e.file == name})


def _verify_file(path: Path, entry: FileEntry, tensors: Mapping[str, TensorEntry]) -> None:
    try:
        with path.open("rb") as file:
            header, layout = _read_header(file.read(HEADER_LENGTH_BYTES), file.read, path)
            if zlib.crc32(header) != entry.header_crc32:
                raise WeightSyncError(f"{path}: corrupted: the header's checksum differs from the index")
            start = HEADER_LENGTH_BYTES + len(header)
            with ThreadPoolExecutor(READERS, thread_name_prefix="checksums") as pool:
                spans = [tuple(start + offset for offset in layout[name]["data_offsets"]) for name in tensors]
                checksums = pool.map(lambda span: _crc32_of(file.fileno(), *span), spans)
                for (name, expected), checksum in zip(tensors.items(), checksums, strict=True):
                    if checksum != expected.crc32:
                        raise WeightSyncError(
                            f"{path}: corrupted: tensor {name!r} has CRC-32 {checksum:#010x}, the index says "
                            f"{expected.crc32:#010x}"
                        )
    except OSError as error:
        raise WeightSyncError(f"{path}: cannot be read: {error}") from error


def _crc32_of(descriptor: int, begin: int, end: int) -> int:
    """Return the CRC-32 of a file's bytes [begin, end); of those before its end, if that comes sooner."""
    checksum = 0
    while begin < end:
        data = os.pread(descriptor, min(end - begin, READ_BYTES), begin)
        if not data:
            break
        checksum, begin = zlib.crc32(data, checksum), begin + len(data)
    return checksum


def _read_header(length: bytes, read: Any, path: Path) -> tuple[bytes, dict[str, Any]]:
    header = read(int.from_bytes(length, "little"))
    try:
        return header, json.loads(header)
    except ValueError as error:
        raise WeightSyncError(f"{path}: corrupted: its safetensors header is not JSON ({error})") from error


def _tensor_bytes(entry: TensorEntry) -> int:
    return int(torch.Size(entry.shape).numel()) * int(getattr(torch, entry.dtype).itemsize)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise write_error(path, error) from error


def sync_directory(directory: Path) -> None:
    """Flush a directory's entries to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_error(path: Path, error: Exception) -> WeightSyncError:
    """Build the error for a failed write: the path, the operating system's error, and the remedy."""
    return WeightSyncError(
        f"{path}: cannot write weights: {error}. The directory must be writable and have room for "
        f"weight_sync.options.keep_versions + 1 copies of the model; free space there or move output_dir"
    )
