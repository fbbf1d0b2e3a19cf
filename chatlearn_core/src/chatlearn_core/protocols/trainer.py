"""The trainer: holds one model with a head, computes per-token outputs, makes optimizer steps, streams its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from chatlearn_core.plugins.records import Export
from chatlearn_core.protocols.lifecycle import Lifecycle
from chatlearn_core.protocols.loss import Loss
from chatlearn_core.types import (
    FileFacts,
    Metrics,
    OutputRequest,
    Outputs,
    Payload,
    TrainBatch,
    WeightManifest,
    WeightShard,
)


@runtime_checkable
class Trainer(Lifecycle, Protocol):
    """One object a rank, SPMD: every rank of a replica gets the same calls in the same order, with its own slice of the
    batch. A rank whose slice is empty still takes part in every collective.
    """

    @property
    def data_parallel_rank(self) -> int:
        """Which slice of a batch this rank takes; ranks of one model-parallel group share it."""

    @property
    def data_parallel_size(self) -> int: ...

    def compute(self, batch: TrainBatch, request: OutputRequest) -> Outputs:
        """Per-token or per-sequence outputs without gradient, on the host, in the batch's own order.

        Micro-batches are this trainer's affair; the result does not depend on them.
        """

    def update(self, batch: TrainBatch, loss: Loss) -> Metrics:
        """Forward, backward and one optimizer step over this rank's slice of a prepared mini-batch.

        Returns metric parts of this rank's slice: the loss's own, ``loss`` (reducer sum), and, on data-parallel rank
        0 only where they are already global, ``grad_norm`` (before clipping) and ``lr``.

        Raises:
            BackendError: the loss or the gradient norm is not finite; names the samples of the micro-batch. The
                weights are unchanged.
        """

    def save(self, directory: Path) -> Mapping[str, FileFacts]:
        """Write a resumable checkpoint: weights, optimizer, schedule, random state. Collective.

        Returns:
            Size and checksum of the files that this rank wrote and flushed to the disk, by path below ``directory``.
            The checkpoint is sealed with these: sizes are compared, and only files without facts are read again.
        """

    def load(self, directory: Path) -> None:
        """Read what ``save`` wrote, also under another world size. Collective.

        Raises:
            CheckpointError: incomplete or of another model; names the file.
        """

    def load_model(self, directory: Path, *, fresh_optimizer: bool = True, decay: float = 0.0) -> None:
        """Take the weights of a Hugging Face model directory of the same architecture, in place. Collective.

        Args:
            fresh_optimizer: also forget optimizer state and count of updates, as if training began here; adapters are
                drawn anew. False keeps them.
            decay: share that stays of each weight: ``decay * own + (1 - decay) * the directory's``, a moving average.

        Raises:
            ModelError: it holds no such model; names tensors. Nothing has changed.
        """

    def export_model(self, directory: Path) -> None:
        """Write a Hugging Face model directory that ``from_pretrained`` loads, tokenizer included. Collective."""

    def manifest(self, payload: Payload = "full") -> WeightManifest | None:
        """Every tensor that the ranks together will stream, by checkpoint name, without touching the tensors.

        Collective; rank 0 returns the whole, others may return None. It is asked once, and again after ``load_model``:
        names, shapes and dtypes do not change in between.

        Args:
            payload: ``full``: the model, adapters merged. ``adapter``: the adapter's tensors alone, by the names peft
                saves them under, with its configuration in ``WeightManifest.adapter``. (A ``delta`` is a transport's
                affair: it is made from ``full``.)
        """

    def weights(self, export: Export = "full_tensors", payload: Payload = "full") -> Iterator[WeightShard]:
        """Stream the weights in checkpoint names. Collective: all ranks step it in one order, and a step never waits
        for a send. Senders gather shards into buckets and hold them, under their ``bucket_bytes``, until they are sent:
        the memory of a yielded tensor is neither used for a later shard nor changed before the next ``update`` as long
        as anyone refers to it. What was gathered for this stream is freed with the last reference.

        Args:
            export: one of the forms the plugin record declares: whole tensors, on every rank, of which ``owner_rank``
                sends each (and another rank to a host that has no receiver beside the owner); or what each rank holds.
            payload: as for ``manifest``.
        """
