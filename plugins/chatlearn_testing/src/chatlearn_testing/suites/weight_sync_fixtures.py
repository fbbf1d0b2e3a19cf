"""Drives a transport for the weight-sync suite: trainers that stream given tensors, and loaders that record them."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_core.plugins.compatibility import BOX_CHANNELS, FULL_CHANNELS
from chatlearn_core.plugins.records import Channel, Export
from chatlearn_core.protocols import WeightReceiver, WeightSender
from chatlearn_core.types import (
    Endpoint,
    GroupRendezvous,
    MemoryHandle,
    Payload,
    SyncOffer,
    SyncRequest,
    TensorSpec,
    WeightManifest,
    WeightShard,
)
from chatlearn_hosting.engine_side.blocks import MappedBlock
from chatlearn_hosting.engine_side.checksums import CorruptedTensorError, require_intact
from chatlearn_hosting.engine_side.groups import SenderGroup, join, tensors_in
from chatlearn_hosting.shared_block import handle_content
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.model_directory import manifest_of, read_checkpoint
from chatlearn_testing.suites.conformance_suite import ConformanceSuite

BUCKET_BYTES = 4096
"""Smaller than the suite's tensors together, so that a transport must send several buckets, bytes."""
DRIVEN_CHANNELS = frozenset({"tensors", "boxes", "checkpoint", "memory_handles", "process_group"})
"""Channels that the suite's loader implements; others need an engine."""


def make_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Build weights that are hard for transports: two dtypes, a scalar, a large and a non-contiguous tensor."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(64, 16, generator=generator),
        "layers.0.proj.weight": torch.randn(8, 16, generator=generator).t(),
        "layers.0.norm.weight": torch.randn(16, generator=generator).to(torch.bfloat16),
        "layers.1.proj.weight": torch.randn(16, 8, generator=generator),
        "layers.1.norm.weight": torch.randn(16, generator=generator).to(torch.bfloat16),
        "scale": torch.randn((), generator=generator),
    }


def make_special_tensors() -> dict[str, Tensor]:
    """Build values and forms that a conversion, a comparison or a copy would change or drop."""
    bits = [0x7FC00000, 0x7FC12345, 0xFFC00001, 0x7F800000, 0xFF800000, 0x80000000, 0x00000001, 0x807FFFFF, 0x3F800001]
    single = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
    half = torch.tensor([0x7E01, 0x7C00, 0xFC00, 0x8000, 0x0001, 0x83FF, 0x3C01], dtype=torch.int32).to(torch.int16)
    return {
        "single.special": single,
        "bfloat16.special": single.view(torch.int32).bitwise_right_shift(16).to(torch.int16).view(torch.bfloat16),
        "half.special": half.view(torch.float16),
        "double.fine": torch.tensor([torch.pi, 1e300, -5e-324, 1.0 + 2**-52], dtype=torch.float64),
        "int64.wide": torch.tensor([2**53 + 1, -(2**62), 2**31, -1]),
        "int32.wide": torch.tensor([2**24 + 1, -(2**31)], dtype=torch.int32),
        "uint8.mask": torch.arange(256, dtype=torch.uint8),
        "bool.mask": torch.tensor([True, False, True, True, False]),
        "int64.scalar": torch.tensor(2**40 + 1),
        "empty": torch.zeros(0, 4),
        "square": torch.arange(16.0).view(4, 4),
        "strided": torch.arange(64, dtype=torch.float64).view(8, 8)[:, ::2].t(),
        "expanded": torch.tensor([[1.5], [2.5]]).expand(2, 3),
    }


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal to the bit: NaN equals the same NaN, and -0.0 is not 0.0."""
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))


class StreamingTrainer:
    """The part of a trainer that a sender uses: ``manifest`` and ``weights`` of one rank."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        rank: int = 0,
        num_ranks: int = 1,
        before: Callable[[str], None] | None = None,
        change: Callable[[WeightShard], WeightShard] | None = None,
    ) -> None:
        """Stream these tensors.

        Args:
            tensors: by checkpoint name.
            rank: rank of this trainer.
            num_ranks: number of ranks that stream together.
            before: called with each tensor's name before it is streamed.
            change: maps each shard to the one that is streamed in its place.
        """
        self.tensors = dict(tensors)
        self._rank, self._num_ranks, self._before = rank, num_ranks, before
        self._change = change or (lambda shard: shard)

    def manifest(self, payload: Payload = "full") -> WeightManifest:
        """Return the manifest of the tensors, whatever the payload."""
        return manifest_of(self.tensors)

    def weights(self, export: Export = "full_tensors", payload: Payload = "full") -> Iterator[WeightShard]:
        """Yield every tensor on every rank, owned in turns (``full_tensors``), or this rank's rows of each (``boxes``).

        Rank 0 owns the scalars and empty tensors of ``boxes``.
        """
        for index, (name, tensor) in enumerate(self.tensors.items()):
            if self._before is not None:
                self._before(name)
            shape = tuple(tensor.shape)
            if export == "full_tensors":
                box = tuple((0, size) for size in shape)
                yield self._change(WeightShard(name, shape, box, index % self._num_ranks, tensor))
            elif self._rank == 0 or (shape and tensor.numel()):
                start, stop = (shape[0] * (self._rank + i) // self._num_ranks for i in (0, 1)) if shape else (0, 0)
                rest = tuple((0, size) for size in shape[1:])
                box = ((start, stop), *rest) if shape else ()
                part = tensor[start:stop] if shape else tensor
                yield self._change(WeightShard(name, shape, box, self._rank, part))


@dataclass(slots=True)
class KeepingLoader:
    """A weight loader that records copies of all tensors; it calls ``before(name)`` before each."""

    before: Callable[[str], None] | None = None
    loaded: dict[str, Tensor] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    """Methods that the receiver called."""
    _groups: dict[str, SenderGroup] = field(default_factory=dict)

    async def load_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Record whole tensors."""
        self.called.add("load_tensors")
        for name, tensor in tensors:
            if self.before is not None:
                self.before(name)
            assert name not in self.loaded, f"{name} was loaded twice"
            self.loaded[name] = tensor.clone()
            await asyncio.sleep(0)

    async def load_boxes(self, shards: Iterable[WeightShard]) -> None:
        """Assemble boxes."""
        self.called.add("load_boxes")
        for shard in shards:
            if self.before is not None:
                self.before(shard.name)
            # Elements that do not arrive stay NaN; uninitialised memory could hold the right values by chance.
            fill = torch.nan if shard.tensor.is_floating_point() else 0
            whole = self.loaded.setdefault(shard.name, shard.tensor.new_full(shard.global_shape, fill))
            whole[tuple(slice(start, stop) for start, stop in shard.box)] = shard.tensor
            await asyncio.sleep(0)

    async def load_handles(self, handle: MemoryHandle) -> None:
        """Read the tensors of a mapped file."""
        self.called.add("load_handles")
        with MappedBlock(handle_content(handle)) as block:
            for name, tensor in block.tensors():
                if self.before is not None:
                    self.before(name)
                assert name not in self.loaded, f"{name} was loaded twice"
                self.loaded[name] = tensor.clone()
                del tensor
                await asyncio.sleep(0)

    @property
    def num_group_ranks(self) -> int:
        """1, as for an engine on one device."""
        return 1

    async def join_group(self, rendezvous: GroupRendezvous) -> None:
        """Join a process group, which stays until ``leave_group`` or the end of the loader."""
        r = rendezvous
        self._groups[r.name] = await asyncio.to_thread(
            join, r.address, r.name, r.backend, r.world_size, r.first_rank, r.timeout_s, secret=r.secret
        )

    async def load_broadcast(
        self, group: str, tensors: Sequence[TensorSpec], checksums: Sequence[int] | None = None
    ) -> None:
        """Receive a broadcast into new memory and record it."""
        self.called.add("load_broadcast")
        flat = torch.empty(sum(spec.num_bytes for spec in tensors), dtype=torch.uint8)
        await asyncio.to_thread(self._groups[group].broadcast(flat).wait)
        named = tensors_in(flat, [(spec.name, spec.dtype, list(spec.shape)) for spec in tensors])
        if checksums is not None:
            try:
                require_intact(named, checksums)
            except CorruptedTensorError as error:
                raise WeightSyncError(str(error)) from error
        for name, tensor in named:
            if self.before is not None:
                self.before(name)
            assert name not in self.loaded, f"{name} was loaded twice"
            self.loaded[name] = tensor

    async def leave_group(self, group: str) -> None:
        """Leave a group; does nothing if it was not joined."""
        left = self._groups.pop(group, None)
        if left is not None:
            left.close()

    def close(self) -> None:
        """Leave the groups that were joined."""
        while self._groups:
            self._groups.popitem()[1].close()

    async def load_checkpoint(self, directory: Path) -> None:
        """Record all tensors of a directory of safetensors."""
        self.called.add("load_checkpoint")
        for name, tensor in read_checkpoint(directory).items():
            if self.before is not None:
                self.before(name)
            self.loaded[name] = tensor

    async def begin(self, policy_version: int, manifest: WeightManifest) -> None:
        """Record the call, which a receiver must not make."""
        self.called.add("begin")

    async def finish(self) -> int:
        """Record the call, which a receiver must not make."""
        self.called.add("finish")
        return 0

    async def fail(self, reason: str) -> None:
        """Record the call, which a receiver must not make."""
        self.called.add("fail")

    def expected_manifest(self) -> WeightManifest:
        """Return the manifest of the recorded tensors."""
        return manifest_of(self.loaded)


@dataclass(slots=True)
class Outcome:
    """Outcome of one sync: for each sender and receiver, its number of bytes or its exception."""

    senders: list[Any]
    receivers: list[Any]
    loaders: list[KeepingLoader]

    @property
    def errors(self) -> list[BaseException]:
        """All exceptions of senders and receivers."""
        return [end for end in [*self.senders, *self.receivers] if isinstance(end, BaseException)]


class Transport:
    """Both ends of the transport under test, called in the order in which a runtime calls them."""

    def __init__(self, suite: type[ConformanceSuite], workspace: Path, export: Export, channel: Channel) -> None:
        self._suite = suite
        self._export: Export = export
        self._channel: Channel = channel
        self.workspace = workspace
        self.closables: list[WeightSender | WeightReceiver] = []
        self.loaders: list[KeepingLoader] = []
        self._count = 0

    def sender(self, endpoint: Endpoint) -> WeightSender:
        """Build a sender with the suite's options; ``close`` closes it."""
        made: WeightSender = self._suite.build("sender")(self._suite.make_options(), endpoint)
        self.closables.append(made)
        return made

    def receiver(self, endpoint: Endpoint) -> WeightReceiver:
        """Build a receiver with the suite's options; ``close`` closes it."""
        made: WeightReceiver = self._suite.build("receiver")(self._suite.make_options(), endpoint)
        self.closables.append(made)
        return made

    def plan(self, tensors: Mapping[str, Tensor], *, ranks: int = 1, replicas: int = 1, **changes: Any) -> SyncRequest:
        """Build a plan for these tensors, with a new sync id and policy version."""
        self._count += 1
        plan = SyncRequest(
            sync_id=f"sync-{self._count}",
            policy_version=self._count,
            base_version=None,
            payload="full",
            channel=self._channel,
            export=self._export,
            manifest=manifest_of(tensors),
            senders=tuple(_endpoint("trainer", 0, rank) for rank in range(ranks)),
            receivers=tuple(_endpoint("generator", replica, 0) for replica in range(replicas)),
            fleet_rule="barrier",
            bucket_bytes=BUCKET_BYTES,
            timeout_s=20.0,
            workspace=str(self.workspace),
        )
        return replace(plan, **changes)

    async def run(
        self,
        plan: SyncRequest,
        trainers: Sequence[StreamingTrainer],
        loaders: Sequence[KeepingLoader] | None = None,
        ends: tuple[Sequence[WeightSender], Sequence[WeightReceiver]] | None = None,
    ) -> Outcome:
        """Run one sync: offers, then sends in threads and receives on the event loop concurrently, then release."""
        senders, receivers = ends or self.ends(plan)
        kept = list(loaders) if loaders is not None else [KeepingLoader() for _ in receivers]
        self.loaders += kept
        offers = [sender.offer(plan) for sender in senders]
        try:
            found = await asyncio.gather(
                *(asyncio.to_thread(s.send, plan, trainer) for s, trainer in zip(senders, trainers, strict=True)),  # type: ignore[arg-type]  # a trainer in what senders use of it
                *(r.receive(plan, offers, loader) for r, loader in zip(receivers, kept, strict=True)),
                return_exceptions=True,
            )
        finally:
            for sender in senders:
                sender.release(plan)
        return Outcome(found[: len(senders)], found[len(senders) :], kept)

    def ends(self, plan: SyncRequest) -> tuple[list[WeightSender], list[WeightReceiver]]:
        """Build new senders and receivers for all endpoints of a plan."""
        return [self.sender(e) for e in plan.senders], [self.receiver(e) for e in plan.receivers]

    def close(self) -> None:
        """Close every end twice, because ``close`` must be idempotent, and then the loaders."""
        for end in self.closables * 2:
            end.close()
        for loader in self.loaders:
            loader.close()


class WeightSyncFixtures(ConformanceSuite):
    """The fixture ``transport``, which uses the channel and export under test."""

    settable: ClassVar[frozenset[str]] = ConformanceSuite.settable | {"channel", "export"}
    channel: ClassVar[Channel | None] = None
    """A channel that the record declares; None: the first one that the suite implements for the export under test."""
    export: ClassVar[Export | None] = None
    """An export that the record declares; None: its first."""

    @classmethod
    def export_under_test(cls) -> Export:
        """Return the export under test: the form in which weights are streamed."""
        exports: tuple[Export, ...] = cls.record().exports
        assert cls.export is None or cls.export in exports, f"the record declares {exports}, not {cls.export!r}"
        return cls.export or exports[0]

    @classmethod
    def channel_under_test(cls) -> Channel | None:
        """Return the channel under test; None: the suite implements no channel that the record declares."""
        channels: tuple[Channel, ...] = cls.record().channels
        if cls.channel is not None:
            assert cls.channel in channels, f"the record declares {channels}, not {cls.channel!r}"
            return cls.channel
        carried = BOX_CHANNELS if cls.export_under_test() == "boxes" else FULL_CHANNELS
        return next((channel for channel in channels if channel in DRIVEN_CHANNELS & carried), None)

    @pytest.fixture
    def transport(self, tmp_path: Path) -> Iterator[Transport]:
        """The transport under test; closed after the test."""
        channel = self.channel_under_test()
        if channel is None:
            not_applicable(f"the suite's loader implements none of the channels {self.record().channels}")
        if self.record().needs_gpus:
            not_applicable("the record declares 'needs_gpus'; the suite runs both ends in one process without GPUs")
        made = Transport(type(self), tmp_path / "workspace", self.export_under_test(), channel)
        yield made
        made.close()

    def run(self, work: Any) -> Any:
        """Run a coroutine; raises ``TimeoutError`` after ``patience_s``."""

        async def bounded() -> Any:
            return await asyncio.wait_for(work, self.patience_s)

        return asyncio.run(bounded())


def assert_loaded(loader: KeepingLoader, tensors: Mapping[str, Tensor]) -> None:
    """Check that exactly these tensors arrived, bit for bit."""
    assert sorted(loader.loaded) == sorted(tensors), "the names received differ from those sent"
    for name, tensor in tensors.items():
        found = loader.loaded[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), f"{name}: {found.dtype} {list(found.shape)}"
        assert same_bits(found, tensor), f"{name}: the values received differ from those sent"


def offers_of(senders: Sequence[WeightSender], plan: SyncRequest) -> list[SyncOffer]:
    """Open a sync on every sender; returns the offers."""
    return [sender.offer(plan) for sender in senders]


def _endpoint(role: str, replica: int, rank: int) -> Endpoint:
    return Endpoint(role, replica, rank, socket.gethostname(), "cpu", os.getpid())
