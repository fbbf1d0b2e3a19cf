"""Checks return values of a transport's two ends at once; an error found later would keep the other ends waiting."""

from __future__ import annotations

from chatlearn_core.exceptions import BackendError, WeightSyncError
from chatlearn_core.plugins.validation import short
from chatlearn_core.types import SyncOffer, WeightManifest

SEND = "send() of its sender"


def checked_offer(offer: object, transport: str, sender_rank: int) -> SyncOffer:
    """Check the result of ``WeightSender.offer``.

    Args:
        transport: name of the plugin.
        sender_rank: rank of the sender.

    Raises:
        WeightSyncError: it is no offer, or names another rank.
    """
    if not isinstance(offer, SyncOffer):
        raise WeightSyncError(
            f"{transport}: offer() of its sender returned {short(offer)}; it must return a SyncOffer. This is a fault"
            " of the plugin"
        )
    if offer.sender_rank != sender_rank:
        raise WeightSyncError(
            f"{transport}: offer() of its sender on rank {sender_rank} returned one with sender_rank"
            f" {short(offer.sender_rank)}. This is a fault of the plugin"
        )
    return offer


def whole_manifest(manifest: object, origin: str) -> WeightManifest:
    """Check the result of ``Trainer.manifest`` on rank 0.

    Raises:
        BackendError: it is no manifest.
    """
    if not isinstance(manifest, WeightManifest):
        raise BackendError(
            f"{origin}: manifest() on rank 0 returned {short(manifest)}; it must return the WeightManifest of all "
            "ranks together. This is a fault of the plugin"
        )
    return manifest


def checked_num_bytes(num_bytes: object, transport: str, call: str = "receive() of its receiver") -> int:
    """Check the result of ``WeightReceiver.receive``, or of ``WeightSender.send``.

    Raises:
        WeightSyncError: it is no number of bytes.
    """
    if not isinstance(num_bytes, int) or isinstance(num_bytes, bool) or num_bytes < 0:
        raise WeightSyncError(
            f"{transport}: {call} returned {short(num_bytes)}; it must return the number of bytes that it moved. This "
            "is a fault of the plugin"
        )
    return num_bytes
