"""Reads a checkpoint of several ranks without executing what its files say.

torch's distributed checkpoint keeps its index in a pickle, ``.metadata``, and unpickling calls whatever functions the
file names. Here the index may name only the records of such an index, its files must lie in the checkpoint's own
directory, and every entry must be a tensor: torch unpickles other entries without restrictions. A pickle may also set
attributes of what it names, so that it gets no class or function of torch's itself, but one that makes the same values.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path, PosixPath
from typing import NoReturn

import torch
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.planner import ReadItem
from torch.serialization import _get_layout

from chatlearn_core.exceptions import CheckpointError

_RECORDS = (
    records.Metadata,
    records.StorageMeta,
    records.TensorStorageMetadata,
    records.TensorProperties,
    records.ChunkStorageMetadata,
    records.MetadataIndex,
    records._MEM_FORMAT_ENCODING,
    _StorageInfo,
)
ALLOWED: Mapping[tuple[str, str], object] = {
    **{(kind.__module__, kind.__qualname__): kind for kind in _RECORDS},
    **{
        ("torch", str(dtype).removeprefix("torch.")): dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype)
    },
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,  # a table of names
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib._local", "PosixPath"): PosixPath,  # Python 3.13
}
"""Every name that an index written by torch refers to. None of them does more than make a value."""


class ShardedReader(FileSystemReader):
    """torch's reader, with an index that cannot execute anything."""

    def __init__(self, directory: Path) -> None:
        """Read the index.

        Raises:
            CheckpointError: it names something that no index names, holds something else than tensors, or refers to
                files outside the directory.
            OSError: it cannot be read.
            pickle.UnpicklingError: it is damaged.
        """
        super().__init__(directory)
        self._index = _read_index(directory / ".metadata")

    def read_metadata(self) -> records.Metadata:
        """The index. Without arguments, so that torch tries no other file where this one is missing."""
        storage = self._index.storage_meta = self._index.storage_meta or records.StorageMeta()
        storage.load_id = self.load_id
        return self._index


class TensorPlanner(DefaultLoadPlanner):
    """Loads tensors only."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> NoReturn:
        """torch would unpickle it."""
        raise CheckpointError(f"the sharded checkpoint holds {read_item.dest_index.fqn!r} as an object, not a tensor")


class _IndexUnpickler(pickle.Unpickler):
    def __init__(self, file: Path) -> None:
        super().__init__(io.BytesIO(file.read_bytes()))
        self._file = file

    def load(self) -> object:
        """What the file holds.

        Raises:
            CheckpointError: it changes a value that this whole process shares, which is undone.
        """
        shared = [(vars(member), dict(vars(member))) for member in records._MEM_FORMAT_ENCODING]
        try:
            return super().load()
        finally:
            is_changed = False
            for attributes, before in shared:
                if attributes != before:
                    is_changed = True
                    attributes.clear()
                    attributes.update(before)
            if is_changed:
                raise CheckpointError(
                    f"{self._file} changes a member of {records._MEM_FORMAT_ENCODING.__name__}, which no index of a"
                    " sharded checkpoint does; that was undone. The file was changed, or is not one of ChatLearn's:"
                    " use a checkpoint that you trust."
                )

    def find_class(self, module: str, name: str) -> object:
        try:
            allowed = ALLOWED[module, name]
            return _stand_in(allowed) if callable(allowed) else allowed
        except KeyError:
            raise CheckpointError(
                f"{self._file} refers to {module}.{name}, which no index of a sharded checkpoint does; nothing was"
                " executed. The file was changed, or is not one of ChatLearn's: use a checkpoint that you trust."
            ) from None


def _stand_in(make: Callable[..., object]) -> type:
    """A new class that makes what a class or function makes; attributes that are set on it change nothing else."""

    def call(_: type, *args: object) -> object:
        return make(*args)

    def new(_: type, *args: object) -> object:
        return make.__new__(make, *args) if isinstance(make, type) else make(*args)

    maker = type("StandIn", (type,), {"__call__": call})
    stand_in: type = type.__call__(maker, getattr(make, "__name__", "made"), (), {"__new__": new})
    return stand_in


def _read_index(file: Path) -> records.Metadata:
    try:
        metadata = _IndexUnpickler(file).load()
        _require_index(metadata, file)
    except (CheckpointError, OSError, pickle.UnpicklingError):
        raise
    except Exception as error:  # damaged pickles raise anything
        raise pickle.UnpicklingError(f"its index is damaged: {type(error).__name__}: {error}") from error
    assert isinstance(metadata, records.Metadata)
    return metadata


def _require_index(metadata: object, file: Path) -> None:
    """What was unpickled has the shape of an index, as far as torch relies on it to be harmless."""
    if not isinstance(metadata, records.Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}, not the index of a sharded checkpoint")
    entries, places = metadata.state_dict_metadata, metadata.storage_data
    if not isinstance(entries, dict) or not isinstance(places, dict):
        raise pickle.UnpicklingError("its tables of tensors are damaged")
    for name, entry in entries.items():
        if not isinstance(entry, records.TensorStorageMetadata):
            raise CheckpointError(f"{file} lists {name!r} as an object; a checkpoint of ChatLearn holds tensors only")
    for place in places.values():
        if not isinstance(place, _StorageInfo):
            raise pickle.UnpicklingError("its table of files is damaged")
        if place.relative_path in ("", "..") or Path(str(place.relative_path)).name != place.relative_path:
            raise CheckpointError(
                f"{file} refers to the file {str(place.relative_path)!r}; a sharded checkpoint's files lie in its own"
                " directory"
            )
        if getattr(place, "transform_descriptors", None):
            raise CheckpointError(
                f"{file} asks for the conversion {place.transform_descriptors!r} of {place.relative_path!r}"
            )
