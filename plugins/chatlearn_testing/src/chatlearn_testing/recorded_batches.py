"""Records the batches that trainer processes receive as files, which a test reads after the run."""

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
    """Write a batch as ``<role>-<rank>-<number>.npz``; ``number`` counts this rank's batches from 0."""
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
    """Read all recorded batches: file name without suffix -> arrays."""
    found: dict[str, Recorded] = {}
    for file in sorted(directory.glob("*.npz")):
        with np.load(file, allow_pickle=False) as content:
            found[file.stem] = dict(content)
    return found
