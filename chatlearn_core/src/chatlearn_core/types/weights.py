"""The description of a model's weights while they travel from a trainer to generators.

Names are checkpoint names: what ``save_pretrained`` writes (experts unfused, tied weights once).
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
    """One tensor as it is named, shaped and typed in a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """torch's name without the prefix: ``float32``, ``bfloat16``."""

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
    """Every tensor of a model by checkpoint name, and the names that stand for another (a tied ``lm_head``)."""

    tensors: Mapping[str, TensorSpec]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """alias -> name in ``tensors``"""
    adapter: Mapping[str, Any] | None = None
    """Of an ``adapter`` payload: the content of peft's ``adapter_config.json``; ``tensors`` are then the adapter's."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, aliases not counted."""
        return sum(spec.num_bytes for spec in self.tensors.values())

    def differences(self, offered: WeightManifest, *, check_dtype: bool = True) -> list[str]:
        """Why ``offered`` cannot be loaded where this manifest is expected: one line a tensor, empty if it can.

        Names must match exactly in both directions (an engine may silently accept an unknown name; we do not), after
        aliases are resolved on both sides.
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
    """A box of one tensor, held by ``owner_rank``. ``tensor.shape`` is the box's extent."""

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
    """Where one tensor lies in a block of memory."""

    spec: TensorSpec
    offset: int
    """Bytes from the start of the block; contiguous from there."""


@dataclass(slots=True, frozen=True)
class MemoryHandle:
    """A block of memory that another process on this host can open, and the tensors in it."""

    kind: Literal["file", "cuda_ipc"]
    content: Any
    """``file``: the path of a file in shared memory, a ``str``. ``cuda_ipc``: by device UUID what
    ``torch.multiprocessing`` needs to rebuild the block, a one-dimensional uint8 tensor.
    """
    num_bytes: int
    tensors: tuple[TensorPlace, ...]


@dataclass(slots=True, frozen=True)
class GroupRendezvous:
    """A process group in which one sender broadcasts to all receiving processes. Rank 0 is the sender.

    The sender holds the TCP store at ``address``; keys are those of a ``torch.distributed`` group of that name, so that
    ``chatlearn_hosting.engine_side.groups.join`` meets it; without a secret, an engine's own
    ``init_custom_process_group`` does.
    """

    name: str
    """Tells the groups of one transport apart; one for each sender."""
    address: str
    """``host:port`` where the sender listens."""
    backend: Literal["gloo", "nccl"]
    world_size: int
    first_rank: int
    """This replica's processes take the ranks from here on, as many as its loader's ``num_group_ranks``."""
    timeout_s: float
    secret: str | None = field(default=None, repr=False)
    """What lets a process in to a store that others than this host reach."""


@dataclass(slots=True, frozen=True)
class Endpoint:
    """One end of a transport: a trainer rank or a generator rank, and where it runs."""

    role: str
    replica: int
    rank: int
    host: str
    device: str
    process: int
    """Process id, so that ends can tell whether they share a process."""
    incarnation: int = 0
    """How often this end was rebuilt in that process: what was agreed with an earlier one is void."""


@dataclass(slots=True, frozen=True)
class SyncRequest:
    """One weight sync, the same on both sides."""

    sync_id: str
    policy_version: int
    """Version every replica serves after it confirmed."""
    base_version: int | None
    """Version a ``delta`` applies to."""
    payload: Payload
    channel: Channel
    """How receivers hand the weights to the generators: of the transport's channels the first that these declare."""
    export: Export
    """How senders stream the weights: whole tensors, or on every rank the boxes that it holds."""
    manifest: WeightManifest
    senders: tuple[Endpoint, ...]
    receivers: tuple[Endpoint, ...]
    fleet_rule: FleetRule
    bucket_bytes: int
    """Upper bound on the memory that a transport holds beyond the weights themselves."""
    timeout_s: float
    workspace: str
    """A directory that senders and receivers share where the transport reaches over files."""


@dataclass(slots=True, frozen=True, eq=False)
class SyncOffer:
    """What a sender publishes about one sync before the bytes move: a path, handles, a rendezvous, a queue."""

    sender_rank: int
    content: object


@dataclass(slots=True, frozen=True)
class SyncReceipt:
    """A replica's confirmation (or failure) of one sync."""

    replica: int
    policy_version: int
    state: ReplicaState
    num_bytes: int = 0
    """Bytes that travelled to this replica."""
    seconds: float = 0.0
    error: str | None = None
    weight_bytes: int = 0
    """Bytes of all tensors of the version, whatever part of them travelled."""
