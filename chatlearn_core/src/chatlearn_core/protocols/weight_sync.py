"""Weight sync: a sender in every trainer rank, a receiver beside every generator replica, one plan for both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from chatlearn_core.protocols.generator import WeightLoader
from chatlearn_core.protocols.trainer import Trainer
from chatlearn_core.types import SyncOffer, SyncRequest


@runtime_checkable
class WeightSender(Protocol):
    """The trainer side of a transport, one a rank, built once as ``sender(options, endpoint)``.

    One sync is ``offer``, then ``send`` at the same time as the receivers' ``receive``, then ``release``.
    """

    def offer(self, plan: SyncRequest) -> SyncOffer:
        """Open the sync and say how receivers reach the bytes. Quick; moves nothing."""

    def send(self, plan: SyncRequest, trainer: Trainer) -> int:
        """Step ``trainer.weights()`` and move the bytes; blocks. Returns the number of bytes this rank sent.

        All ranks step the stream in one order, and a step never waits for a send. Memory beyond the weights, the
        tensors held of the stream included, stays under ``plan.bucket_bytes``; none is held after ``send`` returned.

        Raises:
            WeightSyncError, BackendTimeoutError: names the receivers it waits for.
        """

    def release(self, plan: SyncRequest) -> None:
        """Every receiver has answered: buffers, files and handles of this sync may go. Also called after a failure."""

    def close(self) -> None:
        """Twice is fine."""


@runtime_checkable
class WeightReceiver(Protocol):
    """The generator side of a transport, in the generator's adapter process; ``receiver(options, endpoint)``."""

    async def receive(self, plan: SyncRequest, offers: Sequence[SyncOffer], loader: WeightLoader) -> int:
        """Take the bytes that ``offers`` announce and hand them to the loader's ``load_*`` of this transport's channel.

        ``begin`` and ``finish`` are the caller's. Returns the number of bytes received. Memory that was handed to a
        ``load_*`` may be used again as soon as that call returned.

        Raises:
            WeightSyncError: a checksum, a name or a shape is wrong; names the tensor.
            BackendTimeoutError: names the sender ranks it waits for.
        """

    def close(self) -> None:
        """Twice is fine."""
