"""A transport inside one process: passes whole tensors through one queue per receiver."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from chatlearn_core.exceptions import BackendTimeoutError, WeightSyncError
from chatlearn_core.protocols import Trainer, WeightLoader
from chatlearn_core.types import Endpoint, SyncOffer, SyncRequest
from chatlearn_testing.fakes.arrivals import Arrivals
from chatlearn_testing.fakes.options import FakeOptions

POLL_S = 0.002
Item = tuple[str, Tensor] | BaseException | None
"""A tensor by name, the sender's failure, or the end."""


@dataclass(slots=True, eq=False)
class Mailbox:
    """Queue from one sender to one receiver, with one item in flight, which bounds the memory."""

    sync_id: str
    items: queue.Queue[Item] = field(default_factory=lambda: queue.Queue(maxsize=1))
    left: str | None = None
    """Reason why the receiver left; None while it has not."""
    closed: bool = False


class FakeSender:
    """Implements ``WeightSender``."""

    def __init__(self, options: FakeOptions, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._mailboxes: dict[Endpoint, Mailbox] = {}

    def offer(self, plan: SyncRequest) -> SyncOffer:
        here = (self._endpoint.host, self._endpoint.process)
        for receiver in plan.receivers:
            if (receiver.host, receiver.process) != here:
                raise WeightSyncError(
                    f"{receiver} lives in another process than {self._endpoint}, but 'fake' needs both in one process"
                )
        self._mailboxes = {receiver: Mailbox(plan.sync_id) for receiver in plan.receivers}
        return SyncOffer(self._endpoint.rank, dict(self._mailboxes))

    def send(self, plan: SyncRequest, trainer: Trainer) -> int:
        """See the protocol. Continues without receivers that fail, and raises if none remains."""
        deadline = time.monotonic() + plan.timeout_s
        arrivals = Arrivals(plan, f"sender rank {self._endpoint.rank}")
        sent = 0
        try:
            for shard in trainer.weights():
                if shard.owner_rank == self._endpoint.rank:
                    arrivals.admit(shard)
                    sent += shard.tensor.nbytes
                    self._put((shard.name, shard.tensor.detach().clone()), deadline, plan)  # may wait longer than send
            self._put(None, deadline, plan)
        except BaseException as error:
            for mailbox in self._mailboxes.values():
                while not mailbox.items.empty():
                    mailbox.items.get_nowait()
                mailbox.items.put_nowait(error)
            raise
        return sent

    def release(self, plan: SyncRequest) -> None:
        for mailbox in self._mailboxes.values():
            mailbox.closed = True
        self._mailboxes = {}

    def close(self) -> None:
        for mailbox in self._mailboxes.values():
            mailbox.closed = True

    def _put(self, item: Item, deadline: float, plan: SyncRequest) -> None:
        for receiver, mailbox in self._mailboxes.items():
            while mailbox.left is None:
                try:
                    mailbox.items.put(item, timeout=POLL_S)
                    break
                except queue.Full:
                    if mailbox.closed:
                        mailbox.left = "the sync was released"
                    elif time.monotonic() > deadline:
                        mailbox.left = f"{receiver} received nothing within {plan.timeout_s:g} s"
        if self._mailboxes and all(mailbox.left is not None for mailbox in self._mailboxes.values()):
            reasons = "; ".join(str(mailbox.left) for mailbox in self._mailboxes.values())
            kind = BackendTimeoutError if time.monotonic() > deadline else WeightSyncError
            raise kind(f"sync {plan.sync_id!r}: no receiver is left: {reasons}")


class FakeReceiver:
    """Implements ``WeightReceiver``."""

    def __init__(self, options: FakeOptions, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def receive(self, plan: SyncRequest, offers: Sequence[SyncOffer], loader: WeightLoader) -> int:
        deadline = time.monotonic() + plan.timeout_s
        arrivals = Arrivals(plan, f"receiver replica {self._endpoint.replica}")
        received = 0
        for offer in offers:
            mailbox = offer.content.get(self._endpoint) if isinstance(offer.content, dict) else None
            if not isinstance(mailbox, Mailbox) or mailbox.sync_id != plan.sync_id:
                raise WeightSyncError(
                    f"sync {plan.sync_id!r}: the offer of rank {offer.sender_rank} is of another sync"
                )
            try:
                while (item := await self._take(mailbox, offer, plan, deadline)) is not None:
                    arrivals.admit_whole(*item)
                    await loader.load_tensors([item])
                    received += item[1].nbytes
            except BaseException as error:
                mailbox.left = f"{self._endpoint}: {error}"
                raise
        arrivals.require_all()
        return received

    def close(self) -> None:
        """Nothing is held between syncs."""

    async def _take(
        self, mailbox: Mailbox, offer: SyncOffer, plan: SyncRequest, deadline: float
    ) -> tuple[str, Tensor] | None:
        while True:
            try:
                item = mailbox.items.get_nowait()
            except queue.Empty:
                if mailbox.left is not None or mailbox.closed:
                    raise WeightSyncError(
                        f"sync {plan.sync_id!r}: sender rank {offer.sender_rank} gave up: {mailbox.left or 'released'}"
                    ) from None
                if time.monotonic() > deadline:
                    raise BackendTimeoutError(
                        f"sync {plan.sync_id!r}: {self._endpoint} waited {plan.timeout_s:g} s for sender ranks"
                        f" [{offer.sender_rank}] of role {plan.senders[0].role!r}"
                    ) from None
                await asyncio.sleep(POLL_S)
                continue
            if isinstance(item, BaseException):
                raise WeightSyncError(
                    f"sync {plan.sync_id!r}: sender rank {offer.sender_rank} failed: {type(item).__name__}: {item}"
                ) from item
            return item
