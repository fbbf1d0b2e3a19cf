"""Weight sync: a sender in every trainer rank and a receiver beside every generator replica, which share one plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from chatlearn_core.protocols.generator import WeightLoader
from chatlearn_core.protocols.trainer import Trainer
from chatlearn_core.types import SyncOffer, SyncRequest


@runtime_checkable
class WeightSender(Protocol):
    """The trainer side of a transport, one per rank, built once as ``sender(options, endpoint)``.

    One sync is ``offer``, then ``send`` concurrently with the receivers' ``receive``, then ``release``.
    """

    def offer(self, plan: SyncRequest) -> SyncOffer:
        """Open the sync and say how receivers reach the bytes. Returns quickly and moves no bytes.

        Called: when a sync begins; in each rank's process of the trainer; once per sync.
        """

    def send(self, plan: SyncRequest, trainer: Trainer) -> int:
        """Stream ``trainer.weights()`` and send the bytes; blocks. Returns the number of bytes that this rank sent.

        All ranks advance the stream in the same order, and no step waits for a send. Memory beyond the weights,
        including streamed tensors that are still held, stays within ``plan.bucket_bytes``; none is held after ``send``
        returns.

        Called: after ``offer``, beside the receivers' ``receive``, or before it in a rolling sync that can be
        replayed; in the thread of each rank's process that also computes; once per sync.

        Raises:
            WeightSyncError, BackendTimeoutError: names the receivers that it waits for.
        """

    def release(self, plan: SyncRequest) -> None:
        """Free the sync's buffers, files and handles: every receiver has answered. Also called after a failure.

        Called: when every receiver has answered, or the sync failed; in each rank's process of the trainer; once per
        sync.
        """

    def close(self) -> None:
        """Twice is fine.

        Called: last; in each rank's process of the trainer; once or twice.
        """


@runtime_checkable
class WeightReceiver(Protocol):
    """The generator side of a transport, in the generator's adapter process; ``receiver(options, endpoint)``."""

    async def receive(self, plan: SyncRequest, offers: Sequence[SyncOffer], loader: WeightLoader) -> int:
        """Receive the bytes announced by ``offers`` and pass them to the ``load_*`` of this transport's channel.

        The caller calls ``begin`` and ``finish``. Returns the number of bytes received. Memory passed to a ``load_*``
        may be reused as soon as that call returns.

        Called: after the loader's ``begin``, beside ``send``; on the event loop of each replica's process; once per
        sync.

        Raises:
            WeightSyncError: a checksum, a name or a shape is wrong; names the tensor.
            BackendTimeoutError: names the sender ranks that it waits for.
        """

    def close(self) -> None:
        """Twice is fine.

        Called: last; in each replica's process; once or twice.
        """
