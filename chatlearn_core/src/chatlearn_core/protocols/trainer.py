"""The trainer: holds a model with a head, computes outputs, makes optimizer steps, and streams its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from chatlearn_core.plugins.records import Export
from chatlearn_core.protocols.generator import WeightLoader
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
    """One object per rank, SPMD: every rank of a replica gets the same calls in the same order, with its own slice of
    the batch. A rank with an empty slice still takes part in every collective.
    """

    @property
    def data_parallel_rank(self) -> int:
        """Index of this rank's slice of a batch; ranks of one model-parallel group share it.

        Called: after ``setup``; in each rank's process; any number of times.
        """

    @property
    def data_parallel_size(self) -> int:
        """Number of slices of a batch.

        Called: after ``setup``; in each rank's process; any number of times.
        """

    def compute(self, batch: TrainBatch, request: OutputRequest) -> Outputs:
        """The requested outputs and no others, without gradient, on the host, in batch order. Logprobs and entropies
        are float32.

        The trainer chooses its micro-batches; the result does not depend on them.

        Called: for each call that a flow makes on the role; in each rank's process; once per call and step, more in
        evaluations.
        """

    def update(self, batch: TrainBatch, loss: Loss) -> Metrics:
        """Forward, backward and one optimizer step over this rank's slice of a prepared mini-batch.

        Returns metric parts of this rank's slice: the loss's own, ``loss`` (reducer sum), and the already global
        ``grad_norm`` (before clipping) and ``lr``, on data-parallel rank 0 only.

        Called: for each mini-batch; in each rank's process; ``epochs * mini_batches`` times per step for a role that
        the algorithm updates.

        Raises:
            BackendError: the loss or the gradient norm is not finite; names the samples of the micro-batch. The
                weights, the optimizer and the next update are unaffected.
        """

    def save(self, directory: Path) -> Mapping[str, FileFacts]:
        """Write a resumable checkpoint: weights, optimizer, schedule, random state. Replaces one in this directory.
        Collective call.

        Called: for each checkpoint; in each rank's process; every ``checkpoint.every`` steps and at the end.

        Returns:
            Size and checksum of the files that this rank wrote and flushed to disk, by path below ``directory``. The
            checkpoint records them: later checks compare sizes, and read only files without facts again.
        """

    def load(self, directory: Path) -> None:
        """Read what ``save`` wrote, even under another world size. Collective call.

        Called: when a run resumes or returns to its last checkpoint; in each rank's process; once each time.

        Raises:
            CheckpointError: the checkpoint is incomplete or of another model; names the file.
        """

    def load_model(self, directory: Path, *, fresh_optimizer: bool = True, decay: float = 0.0) -> None:
        """Load the weights of a Hugging Face model directory of the same architecture, in place. Collective call.

        Called: when the role is refreshed from a model directory (``roles.<role>.refresh``); in each rank's process;
        once each time.

        Args:
            fresh_optimizer: also reset the optimizer state and the count of updates, as if training began here;
                adapters are initialised anew. False keeps them.
            decay: new weights are ``decay * own + (1 - decay) * the directory's``, a moving average.

        Raises:
            ModelError: the directory does not hold such a model; names tensors. Nothing has changed.
        """

    def export_model(self, directory: Path) -> None:
        """Write a Hugging Face model directory that ``from_pretrained`` loads, with tokenizer. Collective call.

        Called: when training ends, with ``checkpoint.export``, and for a refresh by a model directory; in each rank's
        process; once each time.
        """

    def manifest(self, payload: Payload = "full") -> WeightManifest | None:
        """Every tensor that the ranks together will stream, by checkpoint name. Does not read the tensors.

        Collective call; rank 0 returns the whole manifest, other ranks may return None. Called once, and again after
        ``load_model``: names, shapes and dtypes do not change in between.

        Called: before the first sync of a payload; in each rank's process; once, and again after ``load_model``.

        Args:
            payload: ``full``: the model, adapters merged. ``adapter``: only the adapter's tensors, under the names peft
                saves them with, and its configuration in ``WeightManifest.adapter``. (Transports make a ``delta`` from
                ``full`` themselves.)
        """

    def weights(self, export: Export = "full_tensors", payload: Payload = "full") -> Iterator[WeightShard]:
        """Stream the weights under checkpoint names. Collective call: all ranks advance the stream in the same order,
        and no step waits for a send.

        Senders gather shards into buckets and hold them, within their ``bucket_bytes``, until they are sent. Therefore
        the memory of a yielded tensor must not be reused for a later shard, nor changed before the next ``update``,
        while a reference to it exists. Memory gathered for this stream is freed with its last reference.

        Called: in a sync, by the transport's ``send``; in each rank's process; once per sync and route.

        Args:
            export: one of the forms declared in the plugin record: whole tensors on every rank, of which
                ``owner_rank`` sends each (and another rank to a host without a receiver beside the owner); or the
                parts that each rank holds.
            payload: as for ``manifest``.
        """


@runtime_checkable
class BackgroundSavingTrainer(Trainer, Protocol):
    """A trainer that writes a checkpoint while it computes and updates (``checkpoint.background``)."""

    def begin_save(self, directory: Path) -> None:
        """Copy all that ``save`` writes to host memory, and begin to write it. Collective call.

        Waits for the writer of a former checkpoint, as ``save`` and ``load`` do: a caller that failed calls no
        ``finish_save``.

        Called: for each checkpoint, with ``checkpoint.background``; in each rank's process; once per checkpoint.
        """

    def finish_save(self) -> Mapping[str, FileFacts]:
        """Wait until the files are written; returns what ``save`` returns. Every rank calls it, in a thread of its own,
        at its own pace and beside other calls.

        Called: after ``begin_save``; in a thread of its own in each rank's process; once per checkpoint.
        """


@runtime_checkable
class WeightTakingTrainer(Trainer, Protocol):
    """A trainer that takes another's weights as a weight sync brings them, by the record's ``channels``."""

    def weight_loader(self, decay: float) -> WeightLoader | None:
        """The receiving side of this rank, for every refresh of a run. Each rank takes all that is sent and keeps what
        it holds; ``load_*`` is not collective, since ranks receive at their own pace.

        The weights after ``finish`` are those after ``load_model`` of the sender's model directory: the same values,
        the optimizer as new. A dtype that differs is converted.

        Called: before the first refresh by weight sync; in each rank's process; once per run, and again after a
        restart of the role.

        Args:
            decay: share that stays of each weight: ``decay * own + (1 - decay) * sent``.

        Returns:
            None where this model cannot take tensors one at a time: it is refreshed from a model directory instead.
        """
