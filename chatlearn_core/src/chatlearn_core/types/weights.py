"""Descriptions of a model's weights on their way from a trainer to generators.

Names are checkpoint names as ``save_pretrained`` writes them (experts unfused, tied weights once).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from chatlearn_core.types.boxes import Box, full_box

if TYPE_CHECKING:
    from chatlearn_core.plugins.records import Channel, Export

Payload = Literal["full", "delta", "adapter"]
FleetRule = Literal["barrier", "rolling"]
ReplicaState = Literal["serving", "loading", "dead"]


@dataclass(slots=True, frozen=True)
class TensorSpec:
    """Name, shape and dtype of one tensor as in a checkpoint.

    Example: ``TensorSpec("lm_head.weight", shape=(151936, 1024), dtype="bfloat16")``
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    """torch's name without ``torch.``: ``float32``, ``bfloat16``."""

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def num_bytes(self) -> int:
        return self.num_elements * int(getattr(torch, self.dtype).itemsize)


@dataclass(slots=True, frozen=True)
class WeightManifest:
    """Every tensor of a model by checkpoint name, and aliases: names that share a tensor (a tied ``lm_head``)."""

    tensors: Mapping[str, TensorSpec]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """alias -> name in ``tensors``"""
    adapter: Mapping[str, Any] | None = None
    """Content of peft's ``adapter_config.json`` for an ``adapter`` payload, whose ``tensors`` are the adapter's."""

    @property
    def num_bytes(self) -> int:
        """Size of all tensors, bytes; aliases are not counted."""
        return sum(spec.num_bytes for spec in self.tensors.values())

    def differences(self, offered: WeightManifest, *, check_dtype: bool = True) -> list[str]:
        """Reasons why ``offered`` cannot be loaded where this manifest is expected: one line per tensor, or none.

        Names must match exactly in both directions after aliases are resolved on both sides: an engine may silently
        accept an unknown name.
        """
        lines: list[str] = []
        for name in sorted(self.tensors.keys() | offered.tensors.keys()):
            want = self.tensors.get(self.aliases.get(name, name))
            have = offered.tensors.get(offered.aliases.get(name, name))
            if want is None:
                lines.append(f"{name}: offered by the trainer, unknown to the generator")
            elif have is None:
                lines.append(f"{name}: expected by the generator, not offered by the trainer")
            elif want.shape != have.shape:
                lines.append(f"{name}: shape {list(have.shape)} offered, {list(want.shape)} expected")
            elif check_dtype and want.dtype != have.dtype:
                lines.append(f"{name}: dtype {have.dtype} offered, {want.dtype} expected")
        return lines


@dataclass(slots=True, frozen=True, eq=False)
class WeightShard:
    """A box of one tensor, held by ``owner_rank``. ``tensor`` has the box's shape."""

    name: str
    global_shape: tuple[int, ...]
    box: Box
    owner_rank: int
    tensor: Tensor

    @property
    def is_whole(self) -> bool:
        return full_box(self.global_shape) == self.box


@dataclass(slots=True, frozen=True)
class TensorPlace:
    """Location of one tensor in a block of memory."""

    spec: TensorSpec
    offset: int
    """Bytes from the start of the block; the tensor is contiguous from there."""


@dataclass(slots=True, frozen=True)
class MemoryHandle:
    """A block of memory that another process on this host can open, and the tensors in it."""

    kind: Literal["file", "cuda_ipc"]
    content: Any
    """For ``file``: the path of a file in shared memory, a ``str``. For ``cuda_ipc``: device UUID -> the data that
    ``torch.multiprocessing`` needs to rebuild the block, a one-dimensional uint8 tensor.
    """
    num_bytes: int
    tensors: tuple[TensorPlace, ...]


@dataclass(slots=True, frozen=True)
class GroupRendezvous:
    """A process group in which one sender broadcasts to all receiving processes. Rank 0 is the sender.

    The sender hosts the TCP store at ``address``. Its keys are those of a ``torch.distributed`` group of that name, so
    that ``chatlearn_hosting.engine_side.groups.join`` can join it; without a secret, so can an engine's own
    ``init_custom_process_group``.
    """

    name: str
    """Unique among the groups of one transport, which has one for each sender."""
    address: str
    """``host:port`` where the sender listens."""
    backend: Literal["gloo", "nccl"]
    world_size: int
    first_rank: int
    """Group rank of this replica's first process; its ``num_group_ranks`` processes take consecutive ranks."""
    timeout_s: float
    secret: str | None = field(default=None, repr=False)
    """Secret that admits a process to a store that other hosts can reach."""


@dataclass(slots=True, frozen=True)
class Endpoint:
    """One end of a transport: a trainer rank or a generator rank, and where it runs."""

    role: str
    replica: int
    rank: int
    host: str
    device: str
    process: int
    """Process id, so that two ends can tell whether they share a process."""
    incarnation: int = 0
    """Number of times this end was rebuilt in its process; agreements with an earlier incarnation are void."""


@dataclass(slots=True, frozen=True)
class SyncRequest:
    """One weight sync; both sides receive the same request."""

    sync_id: str
    policy_version: int
    """Version that every replica serves once it has confirmed."""
    base_version: int | None
    """Version that a ``delta`` applies to."""
    payload: Payload
    channel: Channel
    """How receivers pass the weights to the generators: the transport's first channel that the generators declare."""
    export: Export
    """How senders stream the weights: whole tensors, or on every rank the boxes that the rank holds."""
    manifest: WeightManifest
    senders: tuple[Endpoint, ...]
    receivers: tuple[Endpoint, ...]
    fleet_rule: FleetRule
    bucket_bytes: int
    """Upper bound on the memory that a transport holds in addition to the weights, bytes."""
    timeout_s: float
    workspace: str
    """A directory shared by senders and receivers, if the transport moves weights through files."""


@dataclass(slots=True, frozen=True, eq=False)
class SyncOffer:
    """The data that a sender publishes before a sync moves bytes: a path, handles, a rendezvous, a queue."""

    sender_rank: int
    content: object


@dataclass(slots=True, frozen=True)
class SyncReceipt:
    """A replica's confirmation of one sync, or its failure."""

    replica: int
    policy_version: int
    state: ReplicaState
    num_bytes: int = 0
    """Bytes sent to this replica."""
    seconds: float = 0.0
    error: str | None = None
    weight_bytes: int = 0
    """Size of all tensors of the version, bytes, even if only some of them were sent."""
