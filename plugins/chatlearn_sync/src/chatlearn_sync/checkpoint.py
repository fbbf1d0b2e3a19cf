"""Transport ``checkpoint``: safetensors files on a disk that both ends share; slow, but works between any two hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_core.protocols import Trainer, WeightLoader
from chatlearn_core.types import Endpoint, SyncOffer, SyncRequest, full_box
from chatlearn_sync.options import CheckpointOptions
from chatlearn_sync.shard_spec import ShardSpec
from chatlearn_sync.stream import (
    StreamCheck,
    bucket_limit,
    buckets,
    describe,
    describe_endpoint,
    name_list,
    require_streamed,
    stream,
)
from chatlearn_sync.version_directory import VersionDirectory
from chatlearn_sync.version_reader import boxes_of, tensors_of
from chatlearn_sync.weight_files import (
    INDEX_NAME,
    BoxEntry,
    FileEntry,
    TensorEntry,
    WeightIndex,
    stored_parts,
    verify_files,
    write_hugging_face_index,
    write_shard,
)

NAME = "checkpoint"


class CheckpointSender:
    """Writes this rank's tensors; the lead rank also completes the version and deletes old ones."""

    def __init__(self, options: CheckpointOptions, endpoint: Endpoint) -> None:
        self._options = options
        self._endpoint = endpoint

    def offer(self, plan: SyncRequest) -> SyncOffer:
        """Return the directory of the future version; delete files of an interrupted run with the same names.

        Raises:
            WeightSyncError: the workspace cannot be written.
        """
        return VersionDirectory(plan, NAME, self._endpoint).open()

    def send(self, plan: SyncRequest, trainer: Trainer) -> int:
        """Write and flush this rank's files; the lead rank returns when the version is complete.

        Returns:
            Number of bytes that this rank wrote.
        """
        version = VersionDirectory(plan, NAME, self._endpoint)

        def finish(parts: Sequence[WeightIndex], index: WeightIndex) -> WeightIndex:
            if plan.export == "boxes":
                _require_covered(plan, index)
                return index
            require_streamed(plan.manifest, index.tensors, describe(plan, NAME), " by any rank")
            write_hugging_face_index(version.staging, index)
            return index

        return version.publish(lambda: self._write(plan, version, trainer), finish).num_bytes

    def release(self, plan: SyncRequest) -> None:
        """Delete unfinished files, and complete versions of this role beyond the newest ``keep_versions``.

        Raises:
            WeightSyncError: a directory cannot be removed.
        """
        newest = self._options.keep_versions
        VersionDirectory(plan, NAME, self._endpoint).tidy(lambda versions: [path for path, _ in versions[:newest]])

    def close(self) -> None:
        """Hold nothing between syncs; the newest versions stay on disk for replicas that restart."""

    def _write(self, plan: SyncRequest, version: VersionDirectory, trainer: Trainer) -> WeightIndex:
        where = f"{describe(plan, NAME)}, sender {describe_endpoint(self._endpoint)}"
        check = StreamCheck(plan.manifest, where)
        limit = min(bucket_limit(plan), self._options.max_shard_mb << 20)
        rank = self._endpoint.rank
        files: dict[str, FileEntry] = {}
        tensors: dict[str, TensorEntry] = {}
        boxes: dict[str, BoxEntry] = {}
        shards = stream(plan, trainer)
        for number, bucket in enumerate(buckets(shards, rank, check, limit, boxes=plan.export == "boxes")):
            path = version.staging / f"model-rank{rank:05d}-{number:05d}.safetensors"
            parts, parts_of = stored_parts(bucket)
            files[path.name], entries = write_shard(path, parts)
            tensors.update(entries)
            boxes.update(parts_of)
            del bucket, parts
        return WeightIndex(
            plan.sync_id, plan.policy_version, self._endpoint.role, files, tensors, plan.manifest.aliases, boxes=boxes
        )


class CheckpointReceiver:
    """Waits for a complete version, verifies it and passes its directory to the generator.

    No engine reads a version stored in boxes, so this receiver reads those itself.
    """

    def __init__(self, options: CheckpointOptions, endpoint: Endpoint) -> None:
        self._options = options
        self._endpoint = endpoint

    async def receive(self, plan: SyncRequest, offers: Sequence[SyncOffer], loader: WeightLoader) -> int:
        """Load the version through the plan's channel; returns its size, bytes. Without offers (a replay), the plan
        alone locates it.
        """
        version = VersionDirectory(plan, NAME, self._endpoint)
        version.require_offers(offers)
        index = await version.arrival()
        differences = plan.manifest.differences(index.manifest())
        if differences:
            raise WeightSyncError(
                f"{describe(plan, NAME)}: {version.final / INDEX_NAME} differs from the plan's manifest: "
                f"{name_list(differences)}"
            )
        await asyncio.to_thread(verify_files, version.final, index, checksums=self._options.verify_checksums)
        if plan.channel == "checkpoint":
            await loader.load_checkpoint(version.final)
        elif plan.channel == "boxes":
            for shards in boxes_of(version.final, index, bucket_limit(plan)):
                await loader.load_boxes(iter(shards))
        else:
            for tensors in tensors_of(version.final, index, bucket_limit(plan)):
                await loader.load_tensors(iter(tensors))
        return index.num_bytes

    def close(self) -> None:
        """Do nothing: a receiver holds nothing between syncs."""


def _require_covered(plan: SyncRequest, index: WeightIndex) -> None:
    """Check that the boxes of all ranks cover every element of every tensor in the manifest exactly once.

    Raises:
        WeightSyncError: they do not; names the tensor and the elements.
    """
    check = StreamCheck(plan.manifest, describe(plan, NAME))
    for stored, entry in index.tensors.items():
        box = index.boxes.get(stored)
        shape = entry.shape if box is None else box.global_shape
        check.admit_spec(
            ShardSpec(stored, entry.dtype, shape, full_box(shape))
            if box is None
            else ShardSpec(box.name, entry.dtype, shape, box.box)
        )
    check.complete()
