"""What a transport's two ends return is checked where they return it: later, everybody else would wait for them."""

from __future__ import annotations

from chatlearn_core.exceptions import BackendError, WeightSyncError
from chatlearn_core.plugins.validation import short
from chatlearn_core.types import SyncOffer, WeightManifest


def checked_offer(offer: object, transport: str, sender_rank: int) -> SyncOffer:
    """What ``WeightSender.offer`` returned.

    Args:
        transport: names the plugin.
        sender_rank: of the sender.

    Raises:
        WeightSyncError: it is no offer, or another rank's.
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
    """What ``Trainer.manifest`` returned on rank 0.

    Raises:
        BackendError: it is no manifest.
    """
    if not isinstance(manifest, WeightManifest):
        raise BackendError(
            f"{origin}: manifest() on rank 0 returned {short(manifest)}; it must return the WeightManifest of all "
            "ranks together. This is a fault of the plugin"
        )
    return manifest


def checked_num_bytes(num_bytes: object, transport: str) -> int:
    """What ``WeightReceiver.receive`` returned.

    Raises:
        WeightSyncError: it is no number of bytes.
    """
    if not isinstance(num_bytes, int) or isinstance(num_bytes, bool) or num_bytes < 0:
        raise WeightSyncError(
            f"{transport}: receive() of its receiver returned {short(num_bytes)}; it must return the number of bytes"
            " that it received. This is a fault of the plugin"
        )
    return num_bytes
