"""A trainer that streams given tensors and a loader that keeps what it is given, for both transports."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from chatlearn_core.types import Endpoint, SyncRequest, TensorSpec, WeightManifest, WeightShard

torch.set_num_threads(1)


class FakeTrainer:
    """Streams ``tensors`` as rank ``rank``; calls ``before(name)`` ahead of each."""

    def __init__(self, tensors: dict[str, torch.Tensor], rank: int = 0, before: Callable[[str], None] | None = None):
        self.tensors = tensors
        self.rank = rank
        self.before = before

    def weights(self, export: str = "full_tensors") -> Iterator[WeightShard]:
        for name, tensor in self.tensors.items():
            if self.before is not None:
                self.before(name)
            box = tuple((0, size) for size in tensor.shape)
            yield WeightShard(name, tuple(tensor.shape), box, self.rank, tensor)


class FakeLoader:
    """Keeps clones (as an engine does) and the very objects; calls ``before(name)`` ahead of each tensor."""

    def __init__(self, before: Callable[[str], None] | None = None):
        self.loaded: dict[str, torch.Tensor] = {}
        self.same: dict[str, torch.Tensor] = {}
        self.calls: list[int] = []
        self.before = before

    async def load_tensors(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        size = 0
        for name, tensor in tensors:
            if self.before is not None:
                self.before(name)
            self.loaded[name] = tensor.clone()
            self.same[name] = tensor
            size += tensor.nbytes
            await asyncio.sleep(0)
        self.calls.append(size)

    async def load_checkpoint(self, directory: Path) -> None:
        for path in sorted(directory.glob("*.safetensors")):
            if self.before is not None:
                self.before(path.name)
            self.loaded.update(load_file(path))


def _endpoint(role: str, replica: int = 0, rank: int = 0, process: int | None = None) -> Endpoint:
    return Endpoint(role, replica, rank, "host-a", "cpu", os.getpid() if process is None else process)


def _manifest(tensors: dict[str, torch.Tensor], aliases: dict[str, str] | None = None) -> WeightManifest:
    specs = {n: TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()}
    return WeightManifest(specs, aliases or {})


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "embed.weight": torch.randn(32, 8, generator=generator),
        "layer.0.weight": torch.randn(8, 8, generator=generator).to(torch.bfloat16),
        "layer.0.bias": torch.randn(8, generator=generator),
        "scale": torch.tensor(2.0),
    }


@pytest.fixture
def make_plan(tmp_path: Path) -> Callable[..., SyncRequest]:
    def make(tensors: dict[str, torch.Tensor], aliases: dict[str, str] | None = None, **changes: Any) -> SyncRequest:
        plan = SyncRequest(
            sync_id="sync-1",
            policy_version=1,
            base_version=None,
            payload="full",
            channel="tensors",
            export="full_tensors",
            manifest=_manifest(tensors, aliases),
            senders=(_endpoint("trainer"),),
            receivers=(_endpoint("generator"),),
            fleet_rule="barrier",
            bucket_bytes=3 * 512,
            timeout_s=20.0,
            workspace=str(tmp_path / "sync"),
        )
        return dataclasses.replace(plan, **changes)

    return make


@pytest.fixture
def endpoint() -> Callable[..., Endpoint]:
    return _endpoint


@pytest.fixture
def trainer() -> type[FakeTrainer]:
    return FakeTrainer


@pytest.fixture
def loader() -> type[FakeLoader]:
    return FakeLoader


@pytest.fixture
def run_sync() -> Callable[..., Any]:
    """One sync as the runtime drives it: offers, then sends (threads) beside receives (coroutines), then release."""

    async def run(plan: SyncRequest, senders: list[Any], trainers: list[Any], receivers: list[Any], loaders: list[Any]):
        offers = [sender.offer(plan) for sender in senders]
        try:
            return await asyncio.gather(
                *(asyncio.to_thread(s.send, plan, t) for s, t in zip(senders, trainers, strict=True)),
                *(r.receive(plan, offers, load) for r, load in zip(receivers, loaders, strict=True)),
                return_exceptions=True,
            )
        finally:
            for sender in senders:
                sender.release(plan)

    return run
