"""Transport ``delta``: a full version at intervals, and bit-exact changes in between.

Versions form a chain in the workspace: a full version followed by deltas, each of which applies to the version before
it. A sender rank compares the tensors it streams with its host copy of those it streamed last. A receiver
(``delta_receiver``) keeps such a copy too; a restarted receiver reads the chain from the full version on, without the
trainer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_core.protocols import Trainer
from chatlearn_core.types import Endpoint, SyncOffer, SyncRequest, WeightShard
from chatlearn_hosting.engine_side.checksums import checksum
from chatlearn_sync.changes import changes
from chatlearn_sync.options import DeltaOptions
from chatlearn_sync.stream import (
    StreamCheck,
    bucket_limit,
    describe,
    describe_endpoint,
    owned,
    require_streamed,
    stream,
)
from chatlearn_sync.version_directory import VersionDirectory
from chatlearn_sync.weight_files import FileEntry, TensorEntry, WeightIndex, write_shard

NAME = "delta"


@dataclass(slots=True)
class Held:
    """Host copy of the tensors that this rank streamed last."""

    version: int | None = None
    """Policy version of the copy; None: no complete version that a delta could build on."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    age: int = 0
    """Number of deltas since the last full version."""


class DeltaSender:
    """Writes the changes of this rank's tensors; the lead also completes the version and removes old ones."""

    def __init__(self, options: DeltaOptions, endpoint: Endpoint) -> None:
        self._options = options
        self._endpoint = endpoint
        self._held = Held()

    def offer(self, plan: SyncRequest) -> SyncOffer:
        """Return the directory of the future version; delete files of an interrupted run with the same names.

        Raises:
            WeightSyncError: the workspace cannot be written.
        """
        return VersionDirectory(plan, NAME, self._endpoint).open()

    def send(self, plan: SyncRequest, trainer: Trainer) -> int:
        """Write and flush the changes; the lead rank returns when the version is complete.

        Returns:
            Number of bytes that this rank wrote.
        """
        version = VersionDirectory(plan, NAME, self._endpoint)
        held = self._held
        builds_on = plan.base_version if plan.payload == "delta" and held.age + 1 < self._options.full_every else None
        if builds_on is None or held.version != builds_on:
            held.tensors = {}  # treats everything as changed
        held.version = None  # until this version is complete

        def finish(parts: Sequence[WeightIndex], index: WeightIndex) -> WeightIndex:
            require_streamed(plan.manifest, index.streamed, describe(plan, NAME), " by any rank")
            if set(index.streamed) <= set(index.tensors):
                return index  # all parts are full: no earlier version is needed
            return replace(index, base=self._base(plan, version))

        part = version.publish(lambda: self._write(plan, version, trainer), finish)
        held.version, held.age = plan.policy_version, 0 if builds_on is None else held.age + 1
        return part.num_bytes

    def release(self, plan: SyncRequest) -> None:
        """Delete unfinished files, and versions that the newest one does not build on.

        Raises:
            WeightSyncError: a directory cannot be removed.
        """
        VersionDirectory(plan, NAME, self._endpoint).tidy(_chain)

    def close(self) -> None:
        """Free the host copy; the newest chain stays on disk for replicas that restart."""
        self._held = Held()

    def _write(self, plan: SyncRequest, version: VersionDirectory, trainer: Trainer) -> WeightIndex:
        check = StreamCheck(plan.manifest, f"{describe(plan, NAME)}, sender {describe_endpoint(self._endpoint)}")
        rank, limit = self._endpoint.rank, bucket_limit(plan)
        files: dict[str, FileEntry] = {}
        tensors: dict[str, TensorEntry] = {}
        results: dict[str, int] = {}
        pending: list[tuple[str, Tensor]] = []

        def flush() -> None:
            path = version.staging / f"part-rank{rank:05d}-{len(files):05d}.safetensors"
            files[path.name], entries = write_shard(path, tuple(pending))
            tensors.update(entries)
            pending.clear()

        for name, parts, result in self._changed(owned(stream(plan, trainer), rank, check)):
            results[name] = result
            if pending and sum(part.nbytes for _, part in pending) + sum(p.nbytes for p in parts.values()) > limit:
                flush()
            pending += parts.items()
        if pending:
            flush()
        return WeightIndex(
            plan.sync_id,
            plan.policy_version,
            self._endpoint.role,
            files,
            tensors,
            plan.manifest.aliases,
            streamed=tuple(sorted(check.arrived)),
            results=results,
        )

    def _changed(self, shards: Iterator[WeightShard]) -> Iterator[tuple[str, dict[str, Tensor], int]]:
        """Yield (name, parts to store, checksum of the whole new tensor) of each changed tensor; updates ``held``."""
        held = self._held.tensors
        for shard in shards:
            name, new = shard.name, shard.tensor.to("cpu").contiguous()
            old = held.get(name)
            if old is None or old.shape != new.shape or old.dtype != new.dtype:
                held[name] = old = new.clone()
                yield name, {name: old}, checksum(old)
                continue
            parts = changes(name, old, new)
            if parts:
                old.copy_(new)
                yield name, parts, checksum(old)

    def _base(self, plan: SyncRequest, version: VersionDirectory) -> str:
        for directory, index in version.versions():
            if index.policy_version == plan.base_version:
                return directory.name
        raise WeightSyncError(
            f"{describe(plan, NAME)}: this delta builds on policy version {plan.base_version}, which is missing from "
            f"{plan.workspace}; it may have been deleted. The next sync writes a full version"
        )


def _chain(versions: Sequence[tuple[Path, WeightIndex]]) -> Collection[Path]:
    """Return the directories of the newest version and of all versions it builds on."""
    by_name = {directory.name: (directory, index) for directory, index in versions}
    chain: list[Path] = []
    following = versions[0][0].name if versions else None
    while following is not None and following in by_name:
        directory, index = by_name.pop(following)
        chain.append(directory)
        following = index.base
    return chain
