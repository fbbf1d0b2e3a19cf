"""The trainer's stream of weights, checked against the manifest and cut into buckets."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_core.protocols import Trainer
from chatlearn_core.types import Endpoint, SyncPlan, TensorSpec, WeightManifest, WeightShard

Bucket = tuple[tuple[str, Tensor], ...]
"""Whole tensors by checkpoint name."""

BUFFERS_IN_FLIGHT = 3
"""The bucket being loaded, the bucket being filled, and the tensor that the stream has just yielded."""


def describe(plan: SyncPlan, transport: str) -> str:
    """How messages name one sync."""
    return f"weight sync {plan.sync_id!r} over {transport!r} (policy version {plan.policy_version})"


def describe_endpoint(endpoint: Endpoint) -> str:
    """How messages name one end."""
    return (
        f"role {endpoint.role!r} replica {endpoint.replica} rank {endpoint.rank} "
        f"(host {endpoint.host}, process {endpoint.process})"
    )


def bucket_limit(plan: SyncPlan) -> int:
    """Bytes of one bucket, so that all that are alive at a time stay under ``plan.bucket_bytes``."""
    return max(1, plan.bucket_bytes // BUFFERS_IN_FLIGHT)


def dtype_name(tensor: Tensor) -> str:
    """torch's name without the prefix."""
    return str(tensor.dtype).removeprefix("torch.")


@dataclass(slots=True)
class StreamCheck:
    """Compares what travels with what the plan's manifest promised, tensor by tensor."""

    manifest: WeightManifest
    where: str
    """Leads every message."""
    arrived: set[str] = field(default_factory=set)

    def admit(self, name: str, tensor: Tensor) -> None:
        """Take note of one tensor.

        Raises:
            WeightSyncError: the name is unknown or came before, or shape or dtype differ from the manifest's.
        """
        self.admit_spec(TensorSpec(name, tuple(tensor.shape), dtype_name(tensor)))

    def admit_spec(self, arrived: TensorSpec) -> None:
        """Take note of one tensor by its description. Raises as ``admit``."""
        name = arrived.name
        spec = self.manifest.tensors.get(self.manifest.aliases.get(name, name))
        if spec is None:
            raise WeightSyncError(f"{self.where}: tensor {name!r} is not in the manifest of this sync")
        if name in self.arrived:
            raise WeightSyncError(f"{self.where}: tensor {name!r} was streamed twice")
        if arrived.shape != spec.shape:
            raise WeightSyncError(
                f"{self.where}: tensor {name!r} has shape {list(arrived.shape)}, the manifest says {list(spec.shape)}"
            )
        if arrived.dtype != spec.dtype:
            raise WeightSyncError(
                f"{self.where}: tensor {name!r} has dtype {arrived.dtype}, the manifest says {spec.dtype}"
            )
        self.arrived.add(name)

    def complete(self) -> None:
        """Every tensor of the manifest has arrived; its aliases may have, too.

        Raises:
            WeightSyncError: names those that did not.
        """
        require_streamed(self.manifest, self.arrived, self.where)


def require_streamed(manifest: WeightManifest, arrived: Collection[str], where: str, by: str = "") -> None:
    """Every tensor of a manifest is among those that arrived.

    Args:
        where: leads the message.
        by: who should have streamed them, where that is not clear.

    Raises:
        WeightSyncError: names those that are not.
    """
    missing = sorted(set(manifest.tensors) - set(arrived))
    if missing:
        raise WeightSyncError(
            f"{where}: {len(missing)} of {len(manifest.tensors)} tensors were not streamed{by}: {name_list(missing)}"
        )


def stream(plan: SyncPlan, trainer: Trainer) -> Iterator[WeightShard]:
    """The trainer's whole tensors, of the payload that the plan names; a delta is made from the full ones."""
    return trainer.weights(payload="adapter") if plan.payload == "adapter" else trainer.weights()


def step_through(tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Step a stream that no receiver of this rank takes, since all ranks step it together; the number of bytes sent."""
    for _ in tensors:
        pass
    return 0


def owned(
    shards: Iterable[WeightShard], ranks: int | Collection[int], check: StreamCheck
) -> Iterator[tuple[str, Tensor]]:
    """What a sender sends of a stream, the tensors of these ranks; all of the stream is stepped.

    Raises:
        WeightSyncError: a tensor is not whole or not as the manifest says.
    """
    chosen = (ranks,) if isinstance(ranks, int) else ranks
    for shard in shards:
        if shard.owner_rank not in chosen:
            continue
        if not shard.is_whole:
            raise WeightSyncError(
                f"{check.where}: the trainer streamed the box {shard.box} of tensor {shard.name!r} "
                f"{list(shard.global_shape)}; this transport takes whole tensors (export 'full_tensors')"
            )
        check.admit(shard.name, shard.tensor)
        yield shard.name, shard.tensor.detach()


def buckets(
    shards: Iterable[WeightShard], rank: int, check: StreamCheck, limit: int, *, alone_bytes: int | None = None
) -> Iterator[Bucket]:
    """This rank's tensors, gathered into buckets of at most ``limit`` bytes; a larger tensor is a bucket of its own.

    Args:
        alone_bytes: a tensor of this size is one, too, and overtakes the bucket that is being gathered.

    Raises:
        WeightSyncError: a tensor is not whole or not as the manifest says.
    """
    bucket: list[tuple[str, Tensor]] = []
    held = 0
    for name, tensor in owned(shards, rank, check):
        if alone_bytes is not None and tensor.nbytes >= alone_bytes:
            yield ((name, tensor),)
            del tensor
            continue
        if bucket and held + tensor.nbytes > limit:
            yield tuple(bucket)
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += tensor.nbytes
    if bucket:
        yield tuple(bucket)


def num_bytes(bucket: Bucket) -> int:
    """Bytes of a bucket's tensors."""
    return sum(tensor.nbytes for _, tensor in bucket)


def name_list(names: list[str], most: int = 5) -> str:
    """A few names and how many more there are."""
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
