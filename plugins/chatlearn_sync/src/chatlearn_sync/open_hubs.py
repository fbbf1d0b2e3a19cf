"""The hubs of a sender's open syncs, from the offer to the release."""

from __future__ import annotations

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_core.types import Endpoint, SyncOffer, SyncRequest
from chatlearn_sync.hub import Hub
from chatlearn_sync.messages import ControlOffer
from chatlearn_sync.stream import describe

LAST_STEP_S = 10.0
"""Time for a send in progress to return after its sync was ended, seconds."""


class OpenHubs:
    """One hub for each open sync of one sender."""

    def __init__(self, transport: str, sender: Endpoint) -> None:
        self._transport = transport
        self._sender = sender
        self._hubs: dict[str, Hub] = {}

    def open(self, plan: SyncRequest, host: str | None = None, *, collective: bool = False) -> SyncOffer:
        """Listen for the receivers of a sync; closes an open hub of the same sync first. See ``Hub``."""
        self.release(plan)
        hub = self._hubs[plan.sync_id] = Hub(plan, self._transport, self._sender, host, collective=collective)
        return SyncOffer(self._sender.rank, ControlOffer(self._transport, self._sender, hub.address))

    def of(self, plan: SyncRequest) -> Hub:
        """Return the hub of an open sync.

        Raises:
            WeightSyncError: the sync was not offered, or was released.
        """
        hub = self._hubs.get(plan.sync_id)
        if hub is None:
            raise WeightSyncError(f"{describe(plan, self._transport)}: send was called without an open offer")
        return hub

    def release(self, plan: SyncRequest) -> None:
        """Close the control path of a sync; a receiver or a send still in progress raises."""
        hub = self._hubs.pop(plan.sync_id, None)
        if hub is not None:
            hub.release(WeightSyncError("the sync was released"))

    def close(self) -> None:
        """Close every control path; wait up to ``LAST_STEP_S`` for each send in progress to return."""
        while self._hubs:
            _, hub = self._hubs.popitem()
            hub.release(WeightSyncError("the sender was closed"), wait_s=LAST_STEP_S)
