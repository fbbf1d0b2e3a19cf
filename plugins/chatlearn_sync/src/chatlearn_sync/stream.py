"""The trainer's stream of weights, checked against the manifest and divided into buckets."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_core.protocols import Trainer
from chatlearn_core.types import BoxCover, Endpoint, SyncRequest, WeightManifest, WeightShard
from chatlearn_core.types.boxes import box_text, extent
from chatlearn_sync.shard_spec import ShardSpec

Bucket = tuple[WeightShard, ...]
"""Tensors or boxes that are sent together."""

BUFFERS_IN_FLIGHT = 3
"""The bucket being loaded, the bucket being filled, and the tensor that the stream has just yielded."""


def describe(plan: SyncRequest, transport: str) -> str:
    """Return the text by which messages name a sync."""
    return f"weight sync {plan.sync_id!r} over {transport!r} (policy version {plan.policy_version})"


def describe_endpoint(endpoint: Endpoint) -> str:
    """Return the text by which messages name a sender or receiver."""
    return (
        f"role {endpoint.role!r} replica {endpoint.replica} rank {endpoint.rank} "
        f"(host {endpoint.host}, process {endpoint.process})"
    )


def bucket_limit(plan: SyncRequest) -> int:
    """Return the size limit of a bucket, bytes, at which all live buckets together stay under ``plan.bucket_bytes``."""
    return max(1, plan.bucket_bytes // BUFFERS_IN_FLIGHT)


@dataclass(slots=True)
class StreamCheck:
    """Compares every streamed tensor and box with the manifest of the plan."""

    manifest: WeightManifest
    where: str
    """Prefix of every error message."""
    arrived: set[str] = field(default_factory=set)
    """Names of tensors that have arrived completely."""
    _covers: dict[str, BoxCover] = field(default_factory=dict)
    """Name -> elements that have arrived, for tensors that are incomplete."""

    def admit(self, shard: WeightShard) -> None:
        """Check and record a whole tensor or a box.

        Raises:
            WeightSyncError: the name is unknown, an element arrived before, or shape or dtype differ from the manifest.
        """
        if tuple(shard.tensor.shape) != extent(shard.box):
            raise WeightSyncError(
                f"{self.where}: tensor {shard.name!r} has shape {list(shard.tensor.shape)} for the box "
                f"{box_text(shard.box)}"
            )
        self.admit_spec(ShardSpec.of(shard))

    def admit_spec(self, shard: ShardSpec) -> None:
        """Check and record a tensor or box by its description. Raises as ``admit``."""
        name = shard.name
        spec = self.manifest.tensors.get(self.manifest.aliases.get(name, name))
        if spec is None:
            raise WeightSyncError(f"{self.where}: tensor {name!r} is not in the manifest of this sync")
        if shard.global_shape != spec.shape:
            raise WeightSyncError(
                f"{self.where}: tensor {name!r} has shape {list(shard.global_shape)}, the manifest says "
                f"{list(spec.shape)}"
            )
        if shard.dtype != spec.dtype:
            raise WeightSyncError(
                f"{self.where}: tensor {name!r} has dtype {shard.dtype}, the manifest says {spec.dtype}"
            )
        if name in self.arrived or (shard.is_whole and name in self._covers):
            raise WeightSyncError(f"{self.where}: tensor {name!r} was streamed twice")
        if shard.is_whole:
            self.arrived.add(name)
            return
        cover = self._covers.setdefault(name, BoxCover(spec.shape))
        refusal = cover.add(shard.box)
        if refusal is not None:
            raise WeightSyncError(f"{self.where}: tensor {name!r}: {refusal}")
        if cover.is_complete:
            del self._covers[name]
            self.arrived.add(name)

    def complete(self) -> None:
        """Check that every tensor of the manifest has arrived; aliases are optional.

        Raises:
            WeightSyncError: names the missing tensors, and the missing elements of incomplete ones.
        """
        require_streamed(self.manifest, self.arrived, self.where, covers=self._covers)


def require_streamed(
    manifest: WeightManifest,
    arrived: Collection[str],
    where: str,
    by: str = "",
    covers: Mapping[str, BoxCover] | None = None,
) -> None:
    """Check that every tensor of a manifest has arrived.

    Args:
        where: prefix of the error message.
        by: text that says which sender should have streamed the tensors; empty if ``where`` does.
        covers: name -> elements that have arrived, for incomplete tensors.

    Raises:
        WeightSyncError: names the missing tensors.
    """
    missing = sorted(set(manifest.tensors) - set(arrived))
    if not missing:
        return
    in_part = {name: (covers or {})[name].missing() for name in missing if name in (covers or {})}
    told = [
        f"{name} (elements {', '.join(map(box_text, in_part[name][:3]))})" if in_part.get(name) else name
        for name in missing
    ]
    raise WeightSyncError(
        f"{where}: {len(missing)} of {len(manifest.tensors)} tensors were not streamed{by}: {name_list(told)}"
    )


def stream(plan: SyncRequest, trainer: Trainer) -> Iterator[WeightShard]:
    """Start the trainer's stream of the plan's payload in the plan's export; a delta sync streams full weights."""
    return trainer.weights(payload="adapter") if plan.payload == "adapter" else trainer.weights(plan.export)


def step_through(shards: Iterable[WeightShard]) -> int:
    """Run a stream that has no receiver here, because all ranks must step it together; returns 0, the bytes sent."""
    for _ in shards:
        pass
    return 0


def owned(
    shards: Iterable[WeightShard], ranks: int | Collection[int], check: StreamCheck, *, boxes: bool = False
) -> Iterator[WeightShard]:
    """Yield the shards of a stream that the given ranks own; runs the whole stream.

    Args:
        ranks: owner ranks to select.
        boxes: whether a shard may be a box, that is, a part of a tensor.

    Raises:
        WeightSyncError: a shard differs from the manifest, or is a box without ``boxes``.
    """
    chosen = (ranks,) if isinstance(ranks, int) else ranks
    for shard in shards:
        if shard.owner_rank not in chosen:
            continue
        if not boxes and not shard.is_whole:
            raise WeightSyncError(
                f"{check.where}: the trainer streamed the box {box_text(shard.box)} of tensor {shard.name!r} "
                f"{list(shard.global_shape)}; this sync takes whole tensors (export 'full_tensors')"
            )
        check.admit(shard)
        yield replace(shard, tensor=shard.tensor.detach())


def buckets(
    shards: Iterable[WeightShard],
    rank: int,
    check: StreamCheck,
    limit: int,
    *,
    boxes: bool = False,
    alone_bytes: int | None = None,
) -> Iterator[Bucket]:
    """Group this rank's shards into buckets of at most ``limit`` bytes; a larger shard forms a bucket alone.

    Args:
        boxes: see ``owned``.
        alone_bytes: a shard of at least this size also forms a bucket alone, yielded before the one being filled.

    Raises:
        WeightSyncError: as ``owned``.
    """
    bucket: list[WeightShard] = []
    held = 0
    for shard in owned(shards, rank, check, boxes=boxes):
        size = shard.tensor.nbytes
        if alone_bytes is not None and size >= alone_bytes:
            yield (shard,)
            del shard
            continue
        if bucket and held + size > limit:
            yield tuple(bucket)
            bucket, held = [], 0
        bucket.append(shard)
        held += size
    if bucket:
        yield tuple(bucket)


def num_bytes(bucket: Bucket) -> int:
    """Return the size of a bucket's tensors, bytes."""
    return sum(shard.tensor.nbytes for shard in bucket)


def name_list(names: list[str], most: int = 5) -> str:
    """Join the first ``most`` names, and say how many more there are."""
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
