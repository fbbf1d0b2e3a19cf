"""Receives new weights: checks names, shapes and dtypes, then passes the tensors to every worker of the engine."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_core.types import WeightManifest
from chatlearn_generator_kit.incoming_weights import LoadingReplica
from chatlearn_generator_kit.sync_dtype import SyncDtype
from chatlearn_generator_kit.weight_loader import EngineWeightLoader
from chatlearn_hosting.engine_side.blocks import MappedBlock
from chatlearn_vllm.hosts import EngineHost


class VLLMWeightLoader(EngineWeightLoader):
    """The weight loader of one replica. It collects an adapter first, then gives it to the engine in peft's format."""

    def __init__(
        self,
        replica: LoadingReplica,
        host: EngineHost,
        expected: WeightManifest,
        *,
        num_workers: int,
        takes_adapters: bool,
        sync_dtype: SyncDtype,
        bucket_bytes: int,
    ) -> None:
        super().__init__(
            replica,
            expected,
            num_ranks=num_workers,
            sync_dtype=sync_dtype,
            takes_adapters=takes_adapters,
            bucket_bytes=bucket_bytes,
        )
        self._host = host
        self._adapter: dict[str, Tensor] | None = None
        """Tensors of the arriving adapter; None while a whole model arrives."""
        self._adapter_config: dict[str, Any] = {}

    async def _begin(self, manifest: WeightManifest) -> None:
        self._adapter = None if manifest.adapter is None else {}
        self._adapter_config = dict(manifest.adapter or {})
        await self._host.call("begin_update" if self._adapter is None else "begin_adapter")

    async def _load_tensors(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Load tensors: an engine in this process reads them in place, others read them through shared memory."""
        adapter = self._adapter
        if adapter is not None:
            await asyncio.to_thread(lambda: adapter.update((name, t.detach().cpu().clone()) for name, t in tensors))
        elif self._host.shares_memory and self._num_ranks == 1:
            await self._host.call("load", "tensors", tensors, self._copies)
        else:
            await super()._load_tensors(tensors)

    async def _load(self, source: str, content: Mapping[str, Any]) -> None:
        if self._adapter is None:
            await self._host.call("load", source, dict(content), self._copies)
        elif source == "block":
            with MappedBlock(content) as block:
                self._adapter.update((name, tensor.clone()) for name, tensor in block.tensors())
        else:
            raise WeightSyncError(f"an adapter must arrive as tensors or through shared memory, not by {source!r}")

    async def _join(self, rendezvous: Mapping[str, Any]) -> None:
        await self._host.call("group", {"action": "join", **rendezvous})

    async def _leave(self, name: str) -> None:
        await self._host.call("group", {"action": "leave", "name": name})

    async def _finish(self, policy_version: int) -> None:
        adapter, self._adapter = self._adapter, None
        if adapter is not None:
            with tempfile.TemporaryDirectory(prefix="chatlearn-adapter-") as directory:
                _write_adapter(Path(directory), adapter, self._adapter_config)
                await self._host.call("load_adapter", directory)
        await self._host.call("finish_update", policy_version, adapter is None)


def _write_adapter(directory: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write an adapter in peft's format."""
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "adapter_model.safetensors")
