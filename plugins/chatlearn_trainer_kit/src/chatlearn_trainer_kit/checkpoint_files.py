"""Files of a trainer's checkpoint that every backend writes: the record ``trainer.json`` and random states."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chatlearn_core.exceptions import CheckpointError

TRAINER_FILE = "trainer.json"
"""Written last: a checkpoint without it is incomplete."""


def write_record(directory: Path, record: Mapping[str, Any]) -> None:
    """Write ``trainer.json``."""
    (directory / TRAINER_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def read_record(directory: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of ``trainer.json``.

    Args:
        directory: of the checkpoint.
        identity: values that must agree between the checkpoint and the trainer that loads it.

    Raises:
        CheckpointError: the record is missing or damaged, or of another model.
    """
    file = directory / TRAINER_FILE
    if not file.is_file():
        raise CheckpointError(f"{directory} is not a complete trainer checkpoint: {file.name} is missing")
    try:
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        different = {key: record[key] for key, value in identity.items() if record[key] != value}
    except (ValueError, KeyError, TypeError) as error:
        raise unreadable(file, error) from error
    if different:
        lines = ", ".join(f"{key} {value!r} (this trainer: {identity[key]!r})" for key, value in different.items())
        raise CheckpointError(f"{directory} is a checkpoint of another model or version: {lines}")
    return record


def read_pickle(file: Path) -> dict[str, Any]:
    """Return the dictionary of tensors in a file of ``torch.save``; objects of other kinds are not executed.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        content: Any = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(content, dict):
            raise TypeError(f"it contains a {type(content).__name__}")
    except (OSError, RuntimeError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise unreadable(file, error) from error
    except pickle.UnpicklingError as error:  # torch's message advises executing the file
        raise CheckpointError(
            f"cannot read {file}: it is damaged or contains objects other than tensors; nothing in it was executed. Use"
            " an earlier checkpoint from a source that you trust."
        ) from error
    return content


def unreadable(file: Path, error: BaseException) -> CheckpointError:
    """Return the error for a file that cannot be read."""
    reason = str(error).splitlines()[0] if str(error) else "no details"
    return CheckpointError(
        f"cannot read {file}: {type(error).__name__}: {reason}. It is missing, truncated or damaged; use an earlier"
        " checkpoint."
    )


def random_file(rank: int) -> str:
    """Return the name of the file with a rank's random state."""
    return f"random_{rank}.pt"


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of torch's generators, on the host and on a CUDA device."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Tensor], device: torch.device, file: Path) -> None:
    """Restore what ``random_state`` returned.

    Raises:
        CheckpointError: it is not such a state; the message names ``file``.
    """
    try:
        torch.set_rng_state(state["cpu"])
        if device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], device)
    except (KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise unreadable(file, error) from error
