"""The two sides of a weight sync as ``WeightTransfer`` calls them: senders in the trainer's ranks, and receivers beside
the generator's replicas, or in the ranks of a trainer that is refreshed, each of which counts as a replica.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from typing import Protocol

from chatlearn_core.exceptions import PluginError, WeightSyncError
from chatlearn_core.plugins.validation import short
from chatlearn_core.protocols import Trainer, WeightLoader, WeightReceiver, WeightTakingTrainer
from chatlearn_core.runtime.boundary import Origin
from chatlearn_core.runtime.plan import RunPlan, WeightRoute
from chatlearn_core.types import Endpoint, Payload, SyncOffer, SyncReceipt, SyncRequest, WeightManifest
from chatlearn_runtime_kit.sync_answers import checked_num_bytes

GRACE_S = 5.0
"""Extra time of an outer timeout, seconds, so that the transport's own timeout reports first and names its cause."""


class SenderGroup(Protocol):
    """The senders of all ranks of a trainer. Each method calls every rank, with a timeout."""

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """By rank."""

    @property
    def is_lost(self) -> bool:
        """Whether nothing can be sent until the trainer is rebuilt."""

    async def manifest(self, payload: Payload) -> WeightManifest:
        """See ``Trainer.manifest``."""

    async def offer(self, request: SyncRequest) -> list[SyncOffer]:
        """The checked results of ``WeightSender.offer``, by rank."""

    async def send(self, request: SyncRequest) -> None:
        """See ``WeightSender.send``; returns when every rank has sent."""

    async def release(self, request: SyncRequest) -> None:
        """See ``WeightSender.release``; does nothing if the senders are lost."""

    def close(self) -> None:
        """Close what this process holds. Safe to call twice."""


class ReceiverGroup(Protocol):
    """The receivers of all replicas of a generator, and the replicas' loaders. Every call has a timeout."""

    async def endpoint(self, replica: int) -> Endpoint:
        """The receiver of a replica. A rebuilt replica gets a new receiver.

        Raises:
            BackendError: the replica cannot be reached and is now marked dead.
        """

    async def unfit(self, replica: int, request: SyncRequest) -> list[str]:
        """See ``unfit_tensors``. The replica continues to serve whatever the result."""

    async def begin(self, replica: int, request: SyncRequest) -> None:
        """See ``WeightLoader.begin``. A replica that does not answer in time is marked dead when this raises."""

    async def receive(self, replica: int, request: SyncRequest, offers: Sequence[SyncOffer]) -> SyncReceipt:
        """See ``take_weights``; for a replica that cannot be reached the receipt also says ``dead``."""

    async def fail(self, replicas: Collection[int], reason: str) -> None:
        """Give up replicas: they are dead when this returns."""

    async def lives(self, replica: int) -> bool:
        """Check a replica; if it is not alive, it is marked dead when this returns."""

    def loading(self, replicas: Collection[int]) -> AbstractContextManager[None]:
        """During the block requests bypass these replicas."""

    def interrupted(self, replicas: Collection[int]) -> AbstractAsyncContextManager[None]:
        """During the block these replicas take weights in a sync; see ``GeneratorFleet.at_sync``."""

    def close(self) -> None:
        """Close what this process holds. Safe to call twice."""


def unfit_tensors(loader: WeightLoader, request: SyncRequest) -> list[str]:
    """Names and shapes in which the offered tensors differ from those that a replica expects, one line each. Changes
    nothing.

    Dtypes are left to the loader, which may convert them; adapters define themselves which tensors must arrive.
    """
    if request.payload == "adapter":
        return []
    expected: object = loader.expected_manifest()
    if not isinstance(expected, WeightManifest):
        return [
            f"expected_manifest() of the generator's loader returned {short(expected)}; it returns a WeightManifest"
        ]
    return expected.differences(request.manifest, check_dtype=False)


async def take_weights(
    receiver: WeightReceiver,
    loader: WeightLoader,
    request: SyncRequest,
    offers: Sequence[SyncOffer],
    replica: int,
    transport: str,
) -> SyncReceipt:
    """Load the weights into one replica and serve them: its part of a sync, in the process of its adapter.

    Args:
        transport: name of the plugin, for messages.

    Returns:
        A receipt, even for a failure, after which the replica is dead.
    """
    start = time.perf_counter()
    try:
        async with asyncio.timeout(request.timeout_s + GRACE_S):
            received = await receiver.receive(request, offers, loader)
            num_bytes = checked_num_bytes(received, transport)
            version = await loader.finish()
        if version != request.policy_version:
            raise WeightSyncError(f"it confirmed version {version} where {request.policy_version} was sent")
    except (Exception, SystemExit) as error:  # a SystemExit would end the event loop
        reason = str(error) or f"no answer within {request.timeout_s:g} s (weight_sync.timeout_s)"
        await loader.fail(reason)
        return SyncReceipt(replica, request.policy_version, "dead", error=f"{type(error).__name__}: {reason}")
    seconds = time.perf_counter() - start
    weight_bytes = request.manifest.num_bytes
    return SyncReceipt(replica, version, "serving", num_bytes, seconds, weight_bytes=weight_bytes)


def sync_workspace(plan: RunPlan, route: WeightRoute) -> Path:
    """The directory that both ends of a route share: a refresh has one of its own beside the generators' syncs."""
    directory = plan.run_dir / "weight_sync"
    return directory / "refresh" / route.target if route.target in plan.refreshes else directory


def loader_of(trainer: Trainer, decay: float, origin: Origin) -> WeightLoader | None:
    """See ``WeightTakingTrainer.weight_loader``.

    Raises:
        PluginError: the record declares channels, and the trainer has no loader.
    """
    if not isinstance(trainer, WeightTakingTrainer):
        raise PluginError(
            f"{origin}: its record declares channels by which it takes weights, but {type(trainer).__name__} has no "
            "weight_loader(decay). Add it, or leave channels empty"
        )
    return trainer.weight_loader(decay)


def require_taken(receipts: Sequence[SyncReceipt], route: WeightRoute) -> None:
    """Every rank of a trainer that follows holds what was sent.

    Raises:
        WeightSyncError: one does not; names it.
    """
    for receipt in receipts:
        if receipt.state != "serving":
            raise WeightSyncError(
                f"refresh of role {route.target!r} from role {route.trainer!r} after step {receipt.policy_version}: "
                f"rank {receipt.replica} did not take the weights: {receipt.error}"
            )
