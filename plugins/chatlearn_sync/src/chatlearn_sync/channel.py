"""A bounded channel between one sending thread and receivers on event loops of the same process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from chatlearn_core.exceptions import BackendTimeoutError, WeightSyncError
from chatlearn_core.types import Endpoint, SyncRequest
from chatlearn_sync.stream import Bucket, describe, describe_endpoint

ReceiverKey = tuple[str, int, int]
End = Literal["end"]


def receiver_key(endpoint: Endpoint) -> ReceiverKey:
    """Return what identifies a receiver within a plan: (role, replica, rank)."""
    return (endpoint.role, endpoint.replica, endpoint.rank)


@dataclass(slots=True, eq=False)
class _Inbox:
    """The item that one receiver has not yet acknowledged; at most one, which bounds the memory."""

    receiver: Endpoint
    item: Bucket | End | None = None
    lost: str | None = None
    """Reason why this receiver no longer takes part; None: it does."""
    wake: Callable[[], None] | None = None


class Channel:
    """Passes every bucket to every receiver; ``put`` waits until all have acknowledged the previous bucket.

    A receiver that fails, or does not answer within ``plan.timeout_s``, leaves the sync and the others continue,
    because each replica updates independently. The sender fails when no receiver remains. If the sender fails, all
    receivers fail at once.
    """

    def __init__(self, plan: SyncRequest, sender: Endpoint) -> None:
        self.sender = sender
        self.sync_id = plan.sync_id
        self._where = describe(plan, "direct")
        self._timeout_s = plan.timeout_s
        self._condition = threading.Condition()
        self._inboxes = {receiver_key(endpoint): _Inbox(endpoint) for endpoint in plan.receivers}
        self._failure: BaseException | None = None

    # Sender methods, called in the sending thread.

    def put(self, item: Bucket | End) -> None:
        """Hand ``item`` to every receiver once the previous one is acknowledged; blocks until then.

        Raises:
            WeightSyncError: no receiver remains, or the sync was released.
            BackendTimeoutError: the remaining receivers did not answer in time; names them.
        """
        with self._condition:
            self._wait_acknowledged()
            for inbox in self._live():
                inbox.item = item
                self._wake(inbox)

    def drain(self) -> None:
        """Block until every receiver has acknowledged every item. Raises as ``put`` does."""
        with self._condition:
            self._wait_acknowledged()

    def fail(self, cause: BaseException) -> None:
        """End the sync from the sender's side: every receiver that has not finished raises at its next step."""
        with self._condition:
            if self._failure is None:
                self._failure = cause
            for inbox in self._inboxes.values():
                inbox.item = None
                self._wake(inbox)
            self._condition.notify_all()

    def _live(self) -> list[_Inbox]:
        return [inbox for inbox in self._inboxes.values() if inbox.lost is None]

    def _wait_acknowledged(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while True:
            if self._failure is not None:
                raise WeightSyncError(f"{self._where}: ended on the sender's side: {self._failure}") from self._failure
            if not self._live():
                raise WeightSyncError(f"{self._where}: no receiver remains. {self._losses()}")
            waiting = [inbox for inbox in self._live() if inbox.item is not None]
            if not waiting:
                return
            remaining = deadline - time.monotonic()
            if remaining > 0:
                self._condition.wait(remaining)
                continue
            for inbox in waiting:
                inbox.lost = f"did not acknowledge a bucket within {self._timeout_s:g} s (weight_sync.timeout_s)"
                inbox.item = None
                self._wake(inbox)
            if not self._live():
                raise BackendTimeoutError(
                    f"{self._where}: sender {describe_endpoint(self.sender)} waited for receivers. {self._losses()}"
                )

    def _losses(self) -> str:
        lost = [f"{describe_endpoint(i.receiver)}: {i.lost}" for i in self._inboxes.values() if i.lost is not None]
        return "; ".join(lost) if lost else "The plan names no receivers."

    @staticmethod
    def _wake(inbox: _Inbox) -> None:
        if inbox.wake is None:
            return
        try:
            inbox.wake()
        except RuntimeError as error:  # its event loop is closed: no acknowledgement will come
            inbox.lost = inbox.lost or f"its event loop ended: {error}"
            inbox.item = None

    # Receiver methods, called on the receiver's event loop; none of them blocks.

    def attach(self, endpoint: Endpoint, wake: Callable[[], None]) -> None:
        """Register ``wake``, which the sender's thread calls whenever ``poll`` may return a new item.

        Raises:
            WeightSyncError: the plan does not name this receiver.
        """
        with self._condition:
            inbox = self._inboxes.get(receiver_key(endpoint))
            if inbox is None:
                raise WeightSyncError(f"{self._where}: {describe_endpoint(endpoint)} is not among the plan's receivers")
            inbox.wake = wake

    def poll(self, endpoint: Endpoint) -> Bucket | End | None:
        """Return the item that this receiver has yet to acknowledge; None if there is none.

        Raises:
            WeightSyncError: the sender failed, or dropped this receiver because it did not answer.
        """
        with self._condition:
            inbox = self._inboxes[receiver_key(endpoint)]
            if inbox.lost is not None:
                raise WeightSyncError(f"{self._where}: the sender dropped {describe_endpoint(endpoint)}: {inbox.lost}")
            if self._failure is not None:
                raise WeightSyncError(
                    f"{self._where}: sender {describe_endpoint(self.sender)} failed: "
                    f"{type(self._failure).__name__}: {self._failure}"
                ) from self._failure
            return inbox.item

    def acknowledge(self, endpoint: Endpoint) -> None:
        """Report that the item ``poll`` returned is loaded and its tensors may be freed."""
        with self._condition:
            self._inboxes[receiver_key(endpoint)].item = None
            self._condition.notify_all()

    def leave(self, endpoint: Endpoint, cause: BaseException) -> None:
        """Withdraw this receiver after a failure; the other receivers continue."""
        with self._condition:
            inbox = self._inboxes.get(receiver_key(endpoint))
            if inbox is not None:
                inbox.lost = inbox.lost or f"{type(cause).__name__}: {cause}"
                inbox.item, inbox.wake = None, None
                self._condition.notify_all()

    def detach(self, endpoint: Endpoint) -> None:
        """Stop waking this receiver, which has finished."""
        with self._condition:
            self._inboxes[receiver_key(endpoint)].wake = None
