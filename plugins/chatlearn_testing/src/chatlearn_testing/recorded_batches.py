"""Batches that a trainer was given, written to files, so that a test reads what arrived after a run of processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from chatlearn_core.protocols import RoleContext
from chatlearn_core.types import TrainBatch

Recorded = dict[str, npt.NDArray[np.generic]]
"""The arrays of a batch: ``token_ids``, ``cu_seqlens``, ``loss_mask``, ``num_prompt_tokens``, ``sample_ids``, and
``token_data/<name>`` and ``sequence_data/<name>``."""


def record_batch(directory: Path, context: RoleContext, batch: TrainBatch) -> None:
    """Write the batch behind those that this rank has written, as ``<role>-<rank>-<number>.npz``."""
    directory.mkdir(parents=True, exist_ok=True)
    name = f"{context.role}-{context.rank}"
    number = len(list(directory.glob(f"{name}-*.npz")))
    arrays = {
        "token_ids": batch.token_ids,
        "cu_seqlens": batch.cu_seqlens,
        "loss_mask": batch.loss_mask,
        "num_prompt_tokens": batch.num_prompt_tokens,
        **{f"token_data/{key}": values for key, values in batch.token_data.items()},
        **{f"sequence_data/{key}": values for key, values in batch.sequence_data.items()},
    }
    held = {key: np.asarray(values) for key, values in arrays.items()}
    np.savez(directory / f"{name}-{number:04d}.npz", allow_pickle=False, sample_ids=np.array(batch.sample_ids), **held)


def recorded_batches(directory: Path) -> dict[str, Recorded]:
    """File name -> what ``record_batch`` wrote there."""
    found: dict[str, Recorded] = {}
    for file in sorted(directory.glob("*.npz")):
        with np.load(file, allow_pickle=False) as content:
            found[file.stem] = dict(content)
    return found
