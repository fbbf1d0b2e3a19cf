"""Taking new weights: checked here by name, shape and type, then handed to every worker of the engine."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pickle
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from safetensors.torch import save_file
from torch import Tensor

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, WeightSyncError
from chatlearn_core.hosting import SharedBlock, handle_content
from chatlearn_core.hosting.engine_side.blocks import MappedBlock
from chatlearn_core.types import GroupRendezvous, MemoryHandle, TensorSpec, WeightManifest, WeightShard
from chatlearn_hf.weight_checks import IncomingWeights, LoadingReplica, names_tied_to, require_payload, require_ready
from chatlearn_vllm.hosts import EngineHost

_TIMEOUT_WORDS = ("timed out", "timeout")
"""How torch.distributed says that a peer did not come."""


class Replica(LoadingReplica, Protocol):
    """What a loader needs of its generator."""

    async def stop_serving(self) -> None:
        """State ``loading``; what runs is kept."""

    async def serve(self, policy_version: int) -> None:
        """State ``serving``, under new weights."""

    async def die(self, reason: str, cause: BaseException | None = None) -> None:
        """State ``dead``: every request fails."""


class VLLMWeightLoader:
    """One replica's loader. Whatever goes wrong after ``begin`` leaves the replica dead."""

    def __init__(
        self,
        replica: Replica,
        host: EngineHost,
        expected: WeightManifest,
        *,
        num_workers: int,
        takes_adapters: bool,
        convert_dtype: bool,
        bucket_bytes: int,
    ) -> None:
        self._replica = replica
        self._host = host
        self._num_workers = num_workers
        self._takes_adapters = takes_adapters
        self._bucket_bytes = bucket_bytes
        self._incoming = IncomingWeights(replica.name, expected, convert_dtype=convert_dtype)
        self._copies = names_tied_to(expected)
        self._adapter: dict[str, Tensor] | None = None
        """Tensors of the adapter that is arriving; None while a whole model arrives."""
        self._groups: set[str] = set()
        """Names of those that the workers have joined."""

    def expected_manifest(self) -> WeightManifest:
        """See ``WeightLoader``: the model directory's tensors, in the dtype held here."""
        return self._incoming.expected

    async def begin(self, policy_version: int, manifest: WeightManifest) -> None:
        """See ``WeightLoader``. Requests that run are kept: they wait and go on after ``finish``."""
        require_ready(self._replica, policy_version)
        require_payload(self._replica, policy_version, manifest, takes_adapters=self._takes_adapters)
        self._incoming.begin(policy_version, manifest)
        self._adapter = None if manifest.adapter is None else {}
        await self._replica.stop_serving()
        async with self._or_die("preparing for new weights"):
            await self._host.call("begin_update" if self._adapter is None else "begin_adapter")

    async def load_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See ``WeightLoader``. An engine in this process reads them where they lie; others through shared memory.

        Raises:
            WeightSyncError: a name, shape or dtype is not what ``begin`` announced, or a name came twice; the replica
                is dead, since part of its weights may have changed.
        """
        self._incoming.require_begun("load_tensors")
        async with self._or_die("loading tensors"):
            checked = self._incoming.checked(tensors)
            if self._adapter is not None:
                adapter = self._adapter
                await asyncio.to_thread(lambda: adapter.update((name, t.detach().cpu().clone()) for name, t in checked))
            elif self._host.shares_memory and self._num_workers == 1:
                await self._load("tensors", checked)
            else:
                await self._load_through_memory(checked)

    async def load_boxes(self, shards: Iterable[WeightShard]) -> None:
        """Not a channel of this generator."""
        raise WeightSyncError(
            f"{self._replica.name}: the generator 'vllm' takes whole tensors, not boxes; choose a transport with"
            " channel 'tensors', 'checkpoint', 'memory_handles' or 'process_group'"
        )

    async def load_checkpoint(self, directory: Path) -> None:
        """See ``WeightLoader``: every worker reads one ``model.safetensors``, or the files its index names.

        Raises:
            WeightSyncError: see ``load_tensors``; or a file is missing or damaged.
        """
        self._incoming.require_begun("load_checkpoint")
        async with self._or_die(f"loading checkpoint {directory}"):
            await self._load("checkpoint", self._incoming.check_checkpoint(directory))

    async def load_handles(self, handle: MemoryHandle) -> None:
        """See ``MemoryHandleLoader``: every worker maps the block."""
        self._incoming.require_begun("load_handles")
        async with self._or_die(f"loading from a block of kind {handle.kind!r}"):
            content: dict[str, Any] = {
                "num_bytes": handle.num_bytes,
                "tensors": self._incoming.check_places(handle.tensors),
            }
            if self._adapter is not None:
                if handle.kind != "file":
                    raise WeightSyncError("an adapter is taken from blocks of kind 'file', not of GPU memory")
                with MappedBlock(content | {"path": handle.content}) as block:
                    self._adapter.update((name, tensor.clone()) for name, tensor in block.tensors())
            elif handle.kind == "file":
                await self._load("block", content | {"path": handle.content, "is_reused": True})
            else:
                await self._load("cuda_ipc", content | {"blocks": pickle.dumps(handle.content)})

    @property
    def num_group_ranks(self) -> int:
        """See ``ProcessGroupLoader``: the engine's workers."""
        return self._num_workers

    async def join_group(self, rendezvous: GroupRendezvous) -> None:
        """See ``ProcessGroupLoader``.

        Raises:
            BackendTimeoutError: the sender and the other receivers did not come.
        """
        if rendezvous.name in self._groups:
            return
        try:
            await self._host.call("group", {"action": "join", **dataclasses.asdict(rendezvous)})
        except BackendError as error:
            raise BackendTimeoutError(
                f"{self._replica.name}: its {self._num_workers} workers could not meet the sender of the group"
                f" {rendezvous.name!r} at {rendezvous.address} within {rendezvous.timeout_s:g} s: {error}"
            ) from error
        self._groups.add(rendezvous.name)

    async def load_broadcast(
        self, group: str, tensors: Sequence[TensorSpec], checksums: Sequence[int] | None = None
    ) -> None:
        """See ``ProcessGroupLoader``: the tensors come as one flat bucket of bytes, in their order, without gaps."""
        self._incoming.require_begun("load_broadcast")
        async with self._or_die(f"receiving from the sender of the group {group!r}"):
            if self._adapter is not None:
                raise WeightSyncError("an adapter is taken as tensors or from shared memory, not by a process group")
            wanted = self._incoming.check_broadcast(tensors)
            compared = None if checksums is None else list(checksums)
            await self._load("broadcast", {"group": group, "tensors": wanted, "checksums": compared})

    async def leave_group(self, group: str) -> None:
        """See ``ProcessGroupLoader``."""
        if group in self._groups:
            self._groups.remove(group)
            if not self._replica.is_dead:
                await self._host.call("group", {"action": "leave", "name": group})

    async def finish(self) -> int:
        """See ``WeightLoader``."""
        version = self._incoming.require_begun("finish")
        async with self._or_die(f"finishing policy version {version}"):
            offered = self._incoming.offered
            self._incoming.finish()
            if self._adapter is not None:
                assert offered is not None
                with tempfile.TemporaryDirectory(prefix="chatlearn-adapter-") as directory:
                    _write_adapter(Path(directory), self._adapter, dict(offered.adapter or {}))
                    await self._host.call("load_adapter", directory)
            await self._host.call("finish_update", version, self._adapter is None)
            await self._replica.serve(version)
        self._adapter = None
        return version

    async def fail(self, reason: str) -> None:
        """See ``WeightLoader``."""
        await self._die(reason)

    async def _load(self, source: str, content: Any) -> None:
        await self._host.call("load", source, content, self._copies)

    async def _load_through_memory(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Copy tensors into shared memory, bucket after bucket; the workers read a bucket while it stands still."""
        with await asyncio.to_thread(SharedBlock, self._bucket_bytes) as block:
            handles = block.fill(tensors)
            while (handle := await asyncio.to_thread(next, handles, None)) is not None:
                await self._load("block", handle_content(handle))

    @asynccontextmanager
    async def _or_die(self, what: str) -> AsyncIterator[None]:
        try:
            yield
        except Exception as error:
            cause = _weight_sync_error(error)
            text = str(cause or error)
            await self._die(f"{what} failed: {text}", error)
            if cause is not None:
                raise cause from error
            if any(words in text.lower() for words in _TIMEOUT_WORDS):
                raise BackendTimeoutError(f"{self._replica.name}: {what} failed: {text}") from error
            raise WeightSyncError(
                f"{self._replica.name}: {what} failed after {self._incoming.num_arrived} tensors: {text}"
            ) from error

    async def _die(self, reason: str, cause: BaseException | None = None) -> None:
        self._incoming.reset()
        self._adapter = None
        await self._replica.die(reason, cause)


def _weight_sync_error(error: BaseException | None) -> WeightSyncError | None:
    """The error of ours that an engine passed on, if there is one."""
    while error is not None and not isinstance(error, WeightSyncError):
        error = error.__cause__
    return error


def _write_adapter(directory: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """An adapter as peft saves it."""
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "adapter_model.safetensors")
