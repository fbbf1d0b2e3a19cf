"""Receives new weights for the engine: checks them here; the engine's processes read them in place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_core.types import GroupRendezvous, WeightManifest
from chatlearn_generator_kit.incoming_weights import LoadingReplica, checkpoint_headers
from chatlearn_generator_kit.sync_dtype import SyncDtype
from chatlearn_generator_kit.weight_loader import EngineWeightLoader
from chatlearn_hosting import HostedProcess
from chatlearn_sglang.served_adapter import AdapterTerms, ServedAdapter, served_adapter


class Replica(LoadingReplica, Protocol):
    """The interface of its generator that a loader needs."""

    @property
    def stays_paused(self) -> bool: ...


class SGLangWeightLoader(EngineWeightLoader):
    """Pass checked weights to the engine, which itself skips unknown names silently and crashes on wrong shapes.

    ``begin`` drops the KV cache of running requests; they recompute it under the new weights.
    """

    def __init__(
        self,
        replica: Replica,
        process: HostedProcess,
        expected: WeightManifest,
        *,
        sync_dtype: SyncDtype,
        bucket_bytes: int,
        facts: Mapping[str, Any],
        adapters: AdapterTerms | None = None,
    ) -> None:
        """``adapters``: what the engine was started to serve; None if it takes whole models."""
        super().__init__(
            replica,
            expected,
            num_ranks=int(facts["tp_size"]),
            sync_dtype=sync_dtype,
            takes_adapters=adapters is not None,
            bucket_bytes=bucket_bytes,
        )
        self._served_replica = replica
        self._process = process
        self._num_stages = int(facts["pp_size"])
        self._adapters = adapters
        self._arriving: ServedAdapter | None = None
        """The adapter of the open sync; None if the sync is of whole weights."""
        self._sync_fields: dict[str, Any] = {}
        """Fields that every operation of the open sync sends to the engine's ranks."""

    async def join_group(self, rendezvous: GroupRendezvous) -> None:
        """See ``ProcessGroupLoader``.

        Raises:
            BackendTimeoutError: the sender or other receivers did not join in time.
            WeightSyncError: the engine is pipeline parallel: its stages would need their own ranks.
        """
        if self._num_stages > 1:
            raise WeightSyncError(
                f"{self._replica.name}: a pipeline-parallel engine (pp_size {self._num_stages}) cannot join process"
                " groups; choose a transport with channel 'checkpoint' or 'memory_handles'"
            )
        await super().join_group(rendezvous)

    def load_tied(self, directory: Path, timeout_s: float) -> None:
        """Load tied tensors from the model directory under their second names, which SGLang may skip at its start.

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

    def _check_offer(self, policy_version: int, manifest: WeightManifest) -> None:
        try:
            self._served(manifest)
        except ValueError as error:
            raise WeightSyncError(
                f"{self._replica.name} cannot serve the adapter of policy version {policy_version}:\n{error}"
            ) from error

    def _served(self, manifest: WeightManifest) -> ServedAdapter | None:
        """Translate an offered adapter. Raises: ValueError: lists what SGLang would compute wrongly."""
        if self._adapters is None:
            return None
        return served_adapter(manifest, self._incoming.expected, self._adapters)

    async def _begin(self, manifest: WeightManifest) -> None:
        self._arriving = self._served(manifest)
        is_adapter = self._arriving is not None
        self._sync_fields = {"sync": self._incoming.version, "adapter": is_adapter, "copies": self._copies}
        await self._process.acall("begin_weights")

    async def _load(self, source: str, content: Mapping[str, Any]) -> None:
        await self._process.acall("load", source, {**content, **self._sync_fields})

    async def _join(self, rendezvous: Mapping[str, Any]) -> None:
        await self._load("join", rendezvous)

    async def _leave(self, name: str) -> None:
        await self._load("leave", {"name": name})

    async def _finish(self, policy_version: int) -> None:
        if self._arriving is None:
            await self._load("finish", {})
        else:
            await self._load("adapter", {"config": self._arriving.configuration, "absent": self._arriving.absent})
        await self._process.acall("finish_weights", policy_version, self._served_replica.stays_paused)
