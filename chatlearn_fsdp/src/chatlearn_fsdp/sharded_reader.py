"""Reads a checkpoint of several ranks without executing anything in its files.

torch's distributed checkpoint stores its index in a pickle, ``.metadata``, and unpickling calls any function that the
file names. Here the index may name only the records of such an index, its files must be in the checkpoint's own
directory, and every entry must be a tensor, because torch unpickles other entries without restrictions. A pickle may
also set attributes of the objects it names, so it gets stand-ins that create the same values instead of torch's
classes.
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
    ("torch.serialization", "_get_layout"): _get_layout,  # a lookup table
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib._local", "PosixPath"): PosixPath,  # Python 3.13
}
"""Every name that an index written by torch refers to. All of them only create values."""


class ShardedReader(FileSystemReader):
    """torch's reader with an index that cannot execute code."""

    def __init__(self, directory: Path) -> None:
        """Read the index.

        Raises:
            CheckpointError: the index names something that no index needs, has entries other than tensors, or refers to
                files outside the directory.
            OSError: the index cannot be read.
            pickle.UnpicklingError: the index is damaged.
        """
        super().__init__(directory)
        self._index = _read_index(directory / ".metadata")

    def read_metadata(self) -> records.Metadata:
        """Return the index. Takes no arguments, so that torch tries no other file if this one is missing."""
        storage = self._index.storage_meta = self._index.storage_meta or records.StorageMeta()
        storage.load_id = self.load_id
        return self._index


class TensorPlanner(DefaultLoadPlanner):
    """Planner that loads only tensors."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> NoReturn:
        """Refuse an object, which torch would unpickle."""
        raise CheckpointError(
            f"the sharded checkpoint contains {read_item.dest_index.fqn!r} as an object, not a tensor"
        )


class _IndexUnpickler(pickle.Unpickler):
    def __init__(self, file: Path) -> None:
        super().__init__(io.BytesIO(file.read_bytes()))
        self._file = file

    def load(self) -> object:
        """Unpickle the file.

        Raises:
            CheckpointError: the file changes a value that the whole process shares; the change is undone.
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
                    " sharded checkpoint does; the change was undone. The file was modified, or ChatLearn did not"
                    " write it:"
                    " use a checkpoint that you trust."
                )

    def find_class(self, module: str, name: str) -> object:
        try:
            allowed = ALLOWED[module, name]
            return _stand_in(allowed) if callable(allowed) else allowed
        except KeyError:
            raise CheckpointError(
                f"{self._file} refers to {module}.{name}, which no index of a sharded checkpoint does; nothing was"
                " executed. The file was modified, or ChatLearn did not write it: use a checkpoint that you trust."
            ) from None


def _stand_in(make: Callable[..., object]) -> type:
    """Return a new class that creates the same values as ``make``; setting attributes on it has no other effect."""

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
    """Check that an unpickled object has the shape of an index, as far as torch's safety relies on it."""
    if not isinstance(metadata, records.Metadata):
        raise pickle.UnpicklingError(f"it contains a {type(metadata).__name__}, not the index of a sharded checkpoint")
    entries, places = metadata.state_dict_metadata, metadata.storage_data
    if not isinstance(entries, dict) or not isinstance(places, dict):
        raise pickle.UnpicklingError("its tables of tensors are damaged")
    for name, entry in entries.items():
        if not isinstance(entry, records.TensorStorageMetadata):
            raise CheckpointError(f"{file} lists {name!r} as an object; a ChatLearn checkpoint has only tensors")
    for place in places.values():
        if not isinstance(place, _StorageInfo):
            raise pickle.UnpicklingError("its table of files is damaged")
        if place.relative_path in ("", "..") or Path(str(place.relative_path)).name != place.relative_path:
            raise CheckpointError(
                f"{file} refers to the file {str(place.relative_path)!r}; a sharded checkpoint's files must be in its"
                " own directory"
            )
        if getattr(place, "transform_descriptors", None):
            raise CheckpointError(
                f"{file} requests the conversion {place.transform_descriptors!r} of {place.relative_path!r}"
            )
