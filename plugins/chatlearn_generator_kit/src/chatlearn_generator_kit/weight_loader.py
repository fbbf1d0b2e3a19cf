"""The receiving side of a weight sync in one replica: checks every sync; a failed one leaves the replica dead."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from chatlearn_core.exceptions import (
    BackendError,
    BackendTimeoutError,
    HostedCallError,
    HostedProcessLostError,
    WeightSyncError,
)
from chatlearn_core.types import GroupRendezvous, MemoryHandle, TensorSpec, WeightManifest, WeightShard
from chatlearn_generator_kit.incoming_weights import (
    IncomingWeights,
    LoadingReplica,
    names_tied_to,
    require_payload,
    require_ready,
)
from chatlearn_generator_kit.sync_dtype import SyncDtype
from chatlearn_hosting import SharedBlock, handle_content

_TIMEOUT_PHRASES = ("timed out", "timeout")
"""Phrases by which torch.distributed reports that a peer did not respond."""


class ReplicaWeightLoader(ABC):
    """Implements ``begin``, ``load_tensors``, ``finish`` and ``fail`` of ``WeightLoader``.

    Names, shapes and dtypes are checked before any transfer to the engine. Running requests are kept: they wait and
    continue after ``finish``. After an error part of the weights may have changed, so the replica is dead.
    """

    def __init__(
        self,
        replica: LoadingReplica,
        expected: WeightManifest,
        *,
        sync_dtype: SyncDtype,
        takes_adapters: bool = False,
    ) -> None:
        """Start without an open sync.

        Args:
            replica: the replica that receives the weights.
            expected: manifest of the model directory; all its tensors must arrive.
            sync_dtype: the dtypes that may be offered; the engine casts.
            takes_adapters: whether the engine serves LoRA adapters instead of whole models.
        """
        self._replica = replica
        self._incoming = IncomingWeights(replica.name, expected, sync_dtype=sync_dtype)
        self._takes_adapters = takes_adapters

    # Methods that each backend implements

    @abstractmethod
    async def _begin(self, manifest: WeightManifest) -> None:
        """Prepare the engine for new weights; the replica has stopped serving."""

    @abstractmethod
    async def _load_tensors(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Load checked tensors, which have the names of the model's manifest."""

    @abstractmethod
    async def _finish(self, policy_version: int) -> None:
        """All tensors have arrived: drop caches of the old weights and sample from the new ones."""

    def _check_offer(self, policy_version: int, manifest: WeightManifest) -> None:
        """Check an offer before the sync opens. Raises: WeightSyncError: the engine cannot serve it. Accepts all by
        default.
        """
        return

    # WeightLoader

    def expected_manifest(self) -> WeightManifest:
        """See ``WeightLoader``: the model directory's tensors, in the engine's dtype."""
        return self._incoming.expected

    async def begin(self, policy_version: int, manifest: WeightManifest) -> None:
        """See ``WeightLoader``."""
        require_ready(self._replica, policy_version)
        require_payload(self._replica, policy_version, manifest, takes_adapters=self._takes_adapters)
        self._check_offer(policy_version, manifest)
        self._incoming.begin(policy_version, manifest)
        await self._replica.stop_serving()
        async with self._dead_on_error("preparing for new weights"):
            await self._begin(manifest)

    async def load_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See ``WeightLoader``.

        Raises:
            WeightSyncError: a name, shape or dtype differs from the one ``begin`` announced, or a name came twice.
        """
        self._incoming.require_begun("load_tensors")
        async with self._dead_on_error("loading tensors"):
            await self._load_tensors(self._incoming.checked(tensors))

    async def finish(self) -> int:
        """See ``WeightLoader``."""
        version = self._incoming.require_begun("finish")
        async with self._dead_on_error(f"finishing policy version {version}"):
            self._incoming.finish()
            await self._finish(version)
            await self._replica.serve(version)
        return version

    async def fail(self, reason: str) -> None:
        """See ``WeightLoader``."""
        await self._die(reason)

    # Inside

    @asynccontextmanager
    async def _dead_on_error(self, what: str) -> AsyncIterator[None]:
        """Make the replica dead after an error, and raise a ``WeightSyncError`` or ``BackendTimeoutError`` with the
        reason.
        """
        num_arrived = self._incoming.num_arrived
        try:
            yield
        except Exception as error:
            num_arrived = max(num_arrived, self._incoming.num_arrived)
            refused = _weight_sync_error(error)
            if refused is not None:
                await self._die(f"{what} failed: {refused}", error)
                raise refused from (None if refused is error else error)
            text = error.text if isinstance(error, HostedCallError) else str(error)
            name = error.type_name if isinstance(error, HostedCallError) else type(error).__name__
            total = len(self._incoming.expected.tensors)
            problem = f"{what} failed after {num_arrived} of {total} tensors: {name}: {text}"
            await self._die(problem, error)
            if isinstance(error, BackendTimeoutError) or is_timeout(error):
                raise BackendTimeoutError(f"{self._replica.name}: {problem}") from error
            raise WeightSyncError(f"{self._replica.name}: {problem}") from error

    async def _die(self, reason: str, cause: BaseException | None = None) -> None:
        self._incoming.reset()
        await self._replica.die(reason, cause)


class EngineWeightLoader(ReplicaWeightLoader):
    """A loader whose engine's ranks read the weights themselves: from shared memory, files or a process group.

    Also implements ``MemoryHandleLoader`` and ``ProcessGroupLoader``. The engine receives plain builtins only.
    """

    def __init__(
        self,
        replica: LoadingReplica,
        expected: WeightManifest,
        *,
        num_ranks: int,
        sync_dtype: SyncDtype,
        takes_adapters: bool,
        bucket_bytes: int,
    ) -> None:
        """Start without an open sync; see ``ReplicaWeightLoader``.

        Args:
            replica: see ``ReplicaWeightLoader``.
            expected: see ``ReplicaWeightLoader``.
            num_ranks: number of engine ranks that join a process group.
            sync_dtype: see ``ReplicaWeightLoader``.
            takes_adapters: see ``ReplicaWeightLoader``.
            bucket_bytes: size of the shared memory that carries tensors to the engine.
        """
        super().__init__(replica, expected, sync_dtype=sync_dtype, takes_adapters=takes_adapters)
        self._num_ranks = num_ranks
        self._bucket_bytes = bucket_bytes
        self._copies = names_tied_to(expected)
        """name -> second names, under which the engine holds separate copies."""
        self._groups: dict[str, GroupRendezvous] = {}
        """name -> the process group, for groups that the ranks have joined."""

    # Methods that each backend implements

    @abstractmethod
    async def _load(self, source: str, content: Mapping[str, Any]) -> None:
        """Load a bucket in every rank.

        Args:
            source: ``block``, ``cuda_block``, ``checkpoint`` or ``broadcast``.
            content: where the bucket is; the methods below show its fields.
        """

    @abstractmethod
    async def _join(self, rendezvous: Mapping[str, Any]) -> None:
        """Make every rank join a process group; takes the fields of ``GroupRendezvous``."""

    @abstractmethod
    async def _leave(self, name: str) -> None:
        """Make every rank leave a process group."""

    # WeightLoader

    async def _load_tensors(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Copy tensors into shared memory, bucket by bucket; the ranks read each bucket before the next is filled."""
        with await asyncio.to_thread(SharedBlock, self._bucket_bytes) as block:
            handles = block.fill(tensors)
            while (handle := await asyncio.to_thread(next, handles, None)) is not None:
                await self._load("block", handle_content(handle))

    async def load_boxes(self, shards: Iterable[WeightShard]) -> None:
        """Raise a ``WeightSyncError``: these engines have no channel ``boxes``."""
        raise WeightSyncError(
            f"{self._replica.name} takes whole tensors, not boxes; choose a transport with channel 'tensors',"
            " 'checkpoint', 'memory_handles' or 'process_group'"
        )

    async def load_checkpoint(self, directory: Path) -> None:
        """See ``WeightLoader``. Every rank reads one ``model.safetensors``, or the files that its index names.

        Raises:
            WeightSyncError: see ``load_tensors``; or a file is missing or damaged.
        """
        self._incoming.require_begun("load_checkpoint")
        async with self._dead_on_error(f"loading the checkpoint {directory}"):
            await self._load("checkpoint", {"files": self._incoming.check_checkpoint(directory)})

    async def load_handles(self, handle: MemoryHandle) -> None:
        """See ``MemoryHandleLoader``. Every rank maps the block."""
        self._incoming.require_begun("load_handles")
        async with self._dead_on_error(f"loading a block of kind {handle.kind!r}"):
            content = {"num_bytes": handle.num_bytes, "tensors": self._incoming.check_places(handle.tensors)}
            if handle.kind == "file":
                await self._load("block", content | {"path": handle.content, "is_reused": True})
            else:
                await self._load("cuda_block", content | {"blocks": pickle.dumps(handle.content)})

    @property
    def num_group_ranks(self) -> int:
        """See ``ProcessGroupLoader``."""
        return self._num_ranks

    async def join_group(self, rendezvous: GroupRendezvous) -> None:
        """See ``ProcessGroupLoader``.

        Raises:
            BackendTimeoutError: the sender or other receivers did not join in time.
        """
        if rendezvous.name in self._groups:
            return
        try:
            await self._join(dataclasses.asdict(rendezvous))
        except BackendError as error:
            text = error.text if isinstance(error, HostedCallError) else str(error)
            raise BackendTimeoutError(
                f"{self._replica.name}: its {self._num_ranks} ranks could not join the sender of the group"
                f" {rendezvous.name!r} at {rendezvous.address} within {rendezvous.timeout_s:g} s: {text}"
            ) from error
        self._groups[rendezvous.name] = rendezvous

    async def load_broadcast(
        self, group: str, tensors: Sequence[TensorSpec], checksums: Sequence[int] | None = None
    ) -> None:
        """See ``ProcessGroupLoader``. The tensors arrive as one flat bucket of bytes, in order, without gaps."""
        self._incoming.require_begun("load_broadcast")
        async with self._dead_on_error(f"receiving from the sender of the group {group!r}"):
            if group not in self._groups:
                raise WeightSyncError(f"the group {group!r} has not been joined")
            content = {
                "group": group,
                "tensors": self._incoming.check_broadcast(tensors),
                "checksums": None if checksums is None else list(checksums),
            }
            try:
                await self._load("broadcast", content)
            except HostedCallError as error:
                if not is_timeout(error):
                    raise
                raise BackendTimeoutError(
                    f"rank 0 of the group {group!r} at {self._groups[group].address} sent nothing within"
                    f" {self._groups[group].timeout_s:g} s: {error.text}"
                ) from error

    async def leave_group(self, group: str) -> None:
        """See ``ProcessGroupLoader``."""
        if self._groups.pop(group, None) is not None and not self._replica.is_dead:
            await self._leave(group)


def is_timeout(error: BaseException) -> bool:
    """Whether an engine's error reports a timeout. False if the engine is gone, because it may have printed that
    earlier.
    """
    if isinstance(error, HostedProcessLostError):
        return False
    text = error.text if isinstance(error, HostedCallError) else str(error)
    return any(words in text.lower() for words in _TIMEOUT_PHRASES)


def _weight_sync_error(error: BaseException | None) -> WeightSyncError | None:
    """Return the ``WeightSyncError`` in the chain of causes, if there is one."""
    while error is not None and not isinstance(error, WeightSyncError):
        error = error.__cause__
    return error
