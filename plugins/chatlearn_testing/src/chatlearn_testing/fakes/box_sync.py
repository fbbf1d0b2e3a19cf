"""A transport of boxes between processes: each rank writes a file in the plan's workspace; receivers assemble them."""

from __future__ import annotations

import asyncio
import hashlib
import io
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from chatlearn_core.exceptions import BackendTimeoutError, WeightSyncError
from chatlearn_core.protocols import Trainer, WeightLoader
from chatlearn_core.types import Endpoint, SyncOffer, SyncRequest, WeightShard
from chatlearn_testing.fakes.arrivals import Arrivals
from chatlearn_testing.fakes.options import FakeOptions

POLL_S = 0.005
OFFER = "fake_boxes"
DIGEST_BYTES = hashlib.sha256().digest_size


class FakeBoxSender:
    """Implements ``WeightSender``: writes the boxes of its rank, without communication."""

    def __init__(self, options: FakeOptions, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._open: set[Path] = set()

    def offer(self, plan: SyncRequest) -> SyncOffer:
        _folder(plan).mkdir(parents=True, exist_ok=True)
        self._open.add(_folder(plan))
        return SyncOffer(self._endpoint.rank, OFFER)

    def send(self, plan: SyncRequest, trainer: Trainer) -> int:
        file = _folder(plan) / f"rank-{self._endpoint.rank}"
        arrivals = Arrivals(plan, f"sender rank {self._endpoint.rank}")
        boxes: list[tuple[object, ...]] = []
        num_bytes = 0
        try:
            for shard in trainer.weights("boxes"):
                arrivals.admit(shard)
                boxes.append((shard.name, shard.global_shape, shard.box, shard.owner_rank, shard.tensor.clone()))
                num_bytes += shard.tensor.nbytes
            if len(plan.senders) == 1:
                arrivals.require_all()
        except BaseException as error:
            _write(file.with_suffix(".failed"), f"{type(error).__name__}: {error}".encode())
            raise
        buffer = io.BytesIO()
        torch.save(boxes, buffer)
        content = buffer.getvalue()
        _write(file.with_suffix(".boxes"), hashlib.sha256(content).digest() + content)
        return num_bytes

    def release(self, plan: SyncRequest) -> None:
        shutil.rmtree(_folder(plan), ignore_errors=True)  # another rank may have removed it first
        self._open.discard(_folder(plan))

    def close(self) -> None:
        """Remove the files of syncs that were never released."""
        while self._open:
            shutil.rmtree(self._open.pop(), ignore_errors=True)


class FakeBoxReceiver:
    """Implements ``WeightReceiver``: assembles the boxes of all ranks and loads whole tensors."""

    def __init__(self, options: FakeOptions, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def receive(self, plan: SyncRequest, offers: Sequence[SyncOffer], loader: WeightLoader) -> int:
        arrivals = Arrivals(plan, f"receiver replica {self._endpoint.replica}")
        whole: dict[str, torch.Tensor] = {}
        for offer in offers:
            if offer.content != OFFER:
                raise WeightSyncError(f"sync {plan.sync_id!r}: rank {offer.sender_rank} offered another transport")
            for shard in await self._read(plan, offer.sender_rank):
                arrivals.admit(shard)
                tensor = whole.setdefault(shard.name, shard.tensor.new_empty(shard.global_shape))
                tensor[tuple(slice(start, stop) for start, stop in shard.box)] = shard.tensor
        arrivals.require_all()
        await loader.load_tensors(whole.items())
        return sum(tensor.nbytes for tensor in whole.values())

    def close(self) -> None:
        """Nothing is held between syncs."""

    async def _read(self, plan: SyncRequest, rank: int) -> list[WeightShard]:
        file = _folder(plan) / f"rank-{rank}.boxes"
        failure = file.with_suffix(".failed")
        deadline = time.monotonic() + plan.timeout_s
        while not file.exists():
            if failure.exists():
                raise WeightSyncError(f"sync {plan.sync_id!r}: sender rank {rank} failed: {failure.read_text()}")
            if time.monotonic() > deadline:
                raise BackendTimeoutError(
                    f"sync {plan.sync_id!r}: {self._endpoint} waited {plan.timeout_s:g} s for sender ranks [{rank}] of"
                    f" role {plan.senders[0].role!r} to write {file}"
                )
            await asyncio.sleep(POLL_S)
        data = file.read_bytes()
        digest, content = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:
            raise WeightSyncError(f"{file}: corrupted: its checksum differs from what the sender wrote")
        return [WeightShard(*fields) for fields in torch.load(io.BytesIO(content), weights_only=True)]


def _folder(plan: SyncRequest) -> Path:
    return Path(plan.workspace) / plan.sync_id


def _write(file: Path, content: bytes) -> None:
    partial = file.with_suffix(".partial")
    partial.write_bytes(content)
    partial.replace(file)
