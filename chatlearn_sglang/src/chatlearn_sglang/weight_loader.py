"""Taking new weights into the engine: checked here, read by the engine's own processes where they lie."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from chatlearn_core.exceptions import BackendTimeoutError, HostedCallError, WeightSyncError
from chatlearn_core.hosting import HostedProcess, SharedBlock, handle_content
from chatlearn_core.types import GroupRendezvous, MemoryHandle, TensorSpec, WeightManifest, WeightShard
from chatlearn_hf.weight_checks import (
    IncomingWeights,
    LoadingReplica,
    checkpoint_headers,
    names_tied_to,
    require_payload,
    require_ready,
)
from chatlearn_sglang.served_adapter import AdapterTerms, ServedAdapter, served_adapter

_CHANNELS = "'tensors', 'checkpoint', 'memory_handles' or 'process_group'"


class Replica(LoadingReplica, Protocol):
    """What a loader needs of its generator."""

    @property
    def stays_paused(self) -> bool: ...

    def stop_serving(self) -> None: ...

    def serve(self, policy_version: int) -> None: ...

    def die(self, reason: str) -> None: ...


class SGLangWeightLoader:
    """Names, shapes and types are checked before the engine sees a byte: it skips unknown names silently and dies of
    wrong shapes.

    Requests that run are kept: their KV cache is dropped, and they go on after ``finish`` under the new weights.
    """

    def __init__(
        self,
        replica: Replica,
        process: HostedProcess,
        expected: WeightManifest,
        *,
        convert_dtype: bool,
        bucket_bytes: int,
        facts: Mapping[str, Any],
        adapters: AdapterTerms | None = None,
    ) -> None:
        """``adapters``: what the engine was started to serve; None: it takes whole models."""
        self._replica = replica
        self._process = process
        self._incoming = IncomingWeights(replica.name, expected, convert_dtype=convert_dtype)
        self._bucket_bytes = bucket_bytes
        self._facts = facts
        self._adapters = adapters
        self._arriving: ServedAdapter | None = None
        """The adapter of the sync that is open."""
        self._of_sync: dict[str, Any] = {}
        """What every operation of that sync tells the engine's ranks."""
        self._groups: dict[str, GroupRendezvous] = {}
        self._copies = names_tied_to(expected)

    def expected_manifest(self) -> WeightManifest:
        """See ``WeightLoader``: the model directory's tensors, in the dtype held here."""
        return self._incoming.expected

    async def begin(self, policy_version: int, manifest: WeightManifest) -> None:
        """See ``WeightLoader``."""
        require_ready(self._replica, policy_version)
        require_payload(self._replica, policy_version, manifest, takes_adapters=self._adapters is not None)
        arriving = None
        if self._adapters is not None:
            try:
                arriving = served_adapter(manifest, self._incoming.expected, self._adapters)
            except ValueError as error:
                raise WeightSyncError(
                    f"{self._replica.name} cannot serve the adapter of policy version {policy_version}:\n{error}"
                ) from error
        self._incoming.begin(policy_version, manifest)
        self._arriving = arriving
        self._of_sync = {"sync": policy_version, "adapter": arriving is not None, "copies": self._copies}
        self._replica.stop_serving()
        async with self._or_die("stopping for new weights"):
            await self._process.acall("begin_weights")

    async def load_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See ``WeightLoader``: copied into shared memory, bucket after bucket, for the engine to read.

        Raises:
            WeightSyncError: a name, shape or dtype is not what ``begin`` announced, or a name came twice; the replica
                is dead, since part of its weights may have changed.
        """
        self._incoming.require_begun("load_tensors")
        async with self._or_die("loading tensors"):
            with SharedBlock(self._bucket_bytes) as block:
                handles = block.fill(self._incoming.checked(tensors))
                while (handle := await asyncio.to_thread(next, handles, None)) is not None:
                    await self._load("block", handle_content(handle))

    async def load_boxes(self, shards: Iterable[WeightShard]) -> None:
        """Not a channel of this generator."""
        raise WeightSyncError(
            f"{self._replica.name}: the generator 'sglang' takes whole tensors, not boxes; choose a transport with"
            f" channel {_CHANNELS}"
        )

    async def load_checkpoint(self, directory: Path) -> None:
        """See ``WeightLoader``: every rank reads one ``model.safetensors``, or the files its index names.

        Raises:
            WeightSyncError: see ``load_tensors``; or a file is missing or damaged.
        """
        self._incoming.require_begun("load_checkpoint")
        async with self._or_die(f"loading the checkpoint {directory}"):
            await self._load("checkpoint", {"files": self._incoming.check_checkpoint(directory)})

    async def load_handles(self, handle: MemoryHandle) -> None:
        """See ``MemoryHandleLoader``: every rank maps the block."""
        self._incoming.require_begun("load_handles")
        async with self._or_die(f"loading a block of kind {handle.kind!r}"):
            tensors = self._incoming.check_places(handle.tensors)
            if handle.kind == "file":
                content = {
                    "path": handle.content,
                    "num_bytes": handle.num_bytes,
                    "tensors": tensors,
                    "is_reused": True,
                }
                await self._load("block", content)
            else:
                await self._load("cuda_block", {"blocks": pickle.dumps(handle.content), "tensors": tensors})

    @property
    def num_group_ranks(self) -> int:
        """See ``ProcessGroupLoader``: the engine's tensor-parallel ranks."""
        return int(self._facts["tp_size"])

    async def join_group(self, rendezvous: GroupRendezvous) -> None:
        """See ``ProcessGroupLoader``.

        Raises:
            BackendTimeoutError: the sender and the other receivers did not come.
            WeightSyncError: the engine is pipeline parallel: its stages would need ranks of their own.
        """
        if rendezvous.name in self._groups:
            return
        if self._facts["pp_size"] > 1:
            raise WeightSyncError(
                f"{self._replica.name}: a pipeline-parallel engine (pp_size {self._facts['pp_size']}) cannot join"
                " process groups; choose a transport with channel 'checkpoint' or 'memory_handles'"
            )
        try:
            await self._load("join", dataclasses.asdict(rendezvous))
        except HostedCallError as error:
            raise BackendTimeoutError(
                f"{self._replica.name}: its {self.num_group_ranks} ranks could not meet the sender of the group"
                f" {rendezvous.name!r} at {rendezvous.address} within {rendezvous.timeout_s:g} s: {error.text}"
            ) from error
        self._groups[rendezvous.name] = rendezvous

    async def load_broadcast(
        self, group: str, tensors: Sequence[TensorSpec], checksums: Sequence[int] | None = None
    ) -> None:
        """See ``ProcessGroupLoader``."""
        self._incoming.require_begun("load_broadcast")
        async with self._or_die(f"receiving from the sender of the group {group!r}"):
            if group not in self._groups:
                raise WeightSyncError(f"the group {group!r} was not joined")
            content = {
                "group": group,
                "tensors": self._incoming.check_broadcast(tensors),
                "checksums": None if checksums is None else list(checksums),
            }
            try:
                await self._load("broadcast", content)
            except HostedCallError as error:
                if "timed out" not in error.text.lower():
                    raise
                raise BackendTimeoutError(
                    f"rank 0 of the group {group!r} at {self._groups[group].address} sent nothing within"
                    f" {self._groups[group].timeout_s:g} s: {error.text}"
                ) from error

    async def leave_group(self, group: str) -> None:
        """See ``ProcessGroupLoader``."""
        if self._groups.pop(group, None) is not None and not self._replica.is_dead:
            await self._load("leave", {"name": group})

    async def finish(self) -> int:
        """See ``WeightLoader``."""
        version = self._incoming.require_begun("finish")
        async with self._or_die(f"finishing policy version {version}"):
            self._incoming.finish()
            if self._arriving is None:
                await self._load("finish", {})
            else:
                adapter = {"config": self._arriving.configuration, "absent": self._arriving.absent}
                await self._load("adapter", adapter)
            await self._process.acall("finish_weights", version, self._replica.stays_paused)
        self._replica.serve(version)
        return version

    async def fail(self, reason: str) -> None:
        """See ``WeightLoader``."""
        await self._die(reason)

    async def _load(self, operation: str, content: Mapping[str, Any]) -> None:
        await self._process.acall("load", operation, {**content, **self._of_sync})

    def load_tied(self, directory: Path, timeout_s: float) -> None:
        """Load tied tensors from the model directory under their second names, which SGLang may not do when it starts.

        Blocks; part of ``setup``.
        """
        files = []
        for file, specs in checkpoint_headers(directory) if self._copies else ():
            pairs = [(spec.name, alias) for spec in specs for alias in self._copies.get(spec.name, ())]
            if pairs:
                files.append((str(file), pairs))
        if files:
            of_sync = {"sync": 0, "adapter": False, "copies": {}}
            self._process.call("load", "checkpoint", {"files": files, **of_sync}, timeout_s=timeout_s)
            self._process.call("load", "finish", of_sync, timeout_s=timeout_s)

    @asynccontextmanager
    async def _or_die(self, what: str) -> AsyncIterator[None]:
        """After an error part of the weights may be new: the replica is dead."""
        num_arrived = self._incoming.num_arrived
        try:
            yield
        except Exception as error:
            num_arrived = max(num_arrived, self._incoming.num_arrived)
            text = error.text if isinstance(error, HostedCallError) else str(error)
            if isinstance(error, WeightSyncError):
                await self._die(text)
                raise
            problem = (
                f"{what} failed after {num_arrived} of {len(self._incoming.expected.tensors)} tensors: "
                f"{type(error).__name__}: {text}"
            )
            await self._die(problem)
            if isinstance(error, BackendTimeoutError):
                raise BackendTimeoutError(f"{self._replica.name}: {problem}") from error
            raise WeightSyncError(f"{self._replica.name}: {problem}") from error

    async def _die(self, reason: str) -> None:
        self._incoming.reset()
        await asyncio.to_thread(self._replica.die, reason)
