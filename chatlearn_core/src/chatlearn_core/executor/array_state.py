"""State of JSON values and arrays on disk: the values in a JSON file, the arrays in an NPZ file beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from chatlearn_core.exceptions import CheckpointError

_ARRAY = "$array"
"""The only key of the object that replaces an array; its value is the array's name in the NPZ file."""


def write_array_state(file: Path, state: Mapping[str, Any]) -> None:
    """Write ``state`` to ``file``, and the arrays anywhere in it to an NPZ file beside it.

    Example: ``{"ids": np.array([4, 2])}`` becomes ``{"ids": {"$array": "a0"}}`` and the array ``a0``.

    Raises:
        OSError: the disk cannot be written.
        CheckpointError: the state has an array of Python objects, or a value without a JSON form; names its place.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    values = _without_arrays(state, arrays, file.name)
    file.write_text(json.dumps(values), encoding="utf-8")
    with file.with_suffix(".npz").open("wb") as stream:
        np.savez(stream, **cast(Any, arrays))  # no array has the name of an option of savez


def read_array_state(file: Path) -> dict[str, Any]:
    """Read a state that ``write_array_state`` wrote.

    Raises:
        OSError, ValueError, KeyError, zipfile.BadZipFile, zlib.error: the file cannot be read.
    """
    with np.load(file.with_suffix(".npz"), allow_pickle=False) as arrays:
        found: dict[str, Any] = _with_arrays(json.loads(file.read_text(encoding="utf-8")), arrays)
    return found


def _without_arrays(value: Any, arrays: dict[str, npt.NDArray[Any]], place: str) -> Any:
    """The value with each array replaced by its name; the arrays are added to ``arrays``."""
    if isinstance(value, Mapping):
        if _ARRAY in value:
            raise CheckpointError(f"{place} has the key {_ARRAY!r}, which stands for arrays; choose another name")
        return {str(key): _without_arrays(entry, arrays, f"{place}.{key}") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_arrays(entry, arrays, f"{place}[{index}]") for index, entry in enumerate(value)]
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise CheckpointError(f"{place} is an array of {value.dtype}; checkpoints hold numbers and booleans only")
        name = f"a{len(arrays)}"
        arrays[name] = value
        return {_ARRAY: name}
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise CheckpointError(f"{place} is a {type(value).__name__}; checkpoints hold JSON values and arrays only")


def _with_arrays(value: Any, arrays: Mapping[str, npt.NDArray[Any]]) -> Any:
    if isinstance(value, list):
        return [_with_arrays(entry, arrays) for entry in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_ARRAY}:
        return arrays[value[_ARRAY]]
    return {key: _with_arrays(entry, arrays) for key, entry in value.items()}
