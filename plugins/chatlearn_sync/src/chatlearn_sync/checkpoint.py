"""Transport ``checkpoint``: safetensors on a disk that both ends see.

In ``plan.workspace`` each sender rank writes its own files into ``{sync_id}.{role}.tmp``. The first rank of the plan,
the lead, waits for the others, checks that nothing is missing, writes the index and renames the directory to
``{sync_id}``: that name exists only for a whole version. A rank that fails leaves ``{sync_id}.failed`` with the reason,
so that the others and the receivers stop waiting.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from chatlearn_core.exceptions import BackendTimeoutError, WeightSyncError
from chatlearn_core.protocols import Trainer, WeightLoader
from chatlearn_core.types import Endpoint, SyncOffer, SyncPlan
from chatlearn_sync.options import CheckpointOptions
from chatlearn_sync.stream import StreamCheck, bucket_limit, buckets, describe, describe_endpoint, name_list, stream
from chatlearn_sync.weight_files import (
    INDEX_NAME,
    FileEntry,
    TensorEntry,
    WeightIndex,
    merge_indexes,
    read_index,
    sync_directory,
    verify_files,
    write_error,
    write_hugging_face_index,
    write_index,
    write_shard,
)

POLL_S = 0.02
"""How often a waiting end looks at the directory: a shared disk has no other way to say that something is new."""


@dataclass(slots=True, frozen=True)
class CheckpointOffer:
    """Where the weights will be."""

    directory: str
    """Exists once the version is whole."""


@dataclass(slots=True, frozen=True)
class _Paths:
    final: Path
    staging: Path
    failed: Path

    @staticmethod
    def of(plan: SyncPlan) -> _Paths:
        workspace = Path(plan.workspace)
        role = plan.senders[0].role if plan.senders else ""
        return _Paths(
            workspace / plan.sync_id, workspace / f"{plan.sync_id}.{role}.tmp", workspace / f"{plan.sync_id}.failed"
        )

    def part(self, rank: int) -> Path:
        return self.staging / f"rank-{rank:05d}.json"


class CheckpointSender:
    """Writes this rank's tensors; the lead also completes the version and tidies old ones away."""

    def __init__(self, options: CheckpointOptions, endpoint: Endpoint) -> None:
        self._options = options
        self._endpoint = endpoint

    def offer(self, plan: SyncPlan) -> SyncOffer:
        """Say where the weights will be, and clear what an interrupted run left under the same names.

        Raises:
            WeightSyncError: the workspace cannot be written.
        """
        paths = _Paths.of(plan)
        if self._is_lead(plan):
            try:
                paths.final.parent.mkdir(parents=True, exist_ok=True)
                for directory in (paths.final, *paths.final.parent.glob(f"*.{self._endpoint.role}.tmp")):
                    if directory.exists():
                        shutil.rmtree(directory)
                paths.failed.unlink(missing_ok=True)
                paths.staging.mkdir()
            except OSError as error:
                raise write_error(Path(plan.workspace), error) from error
        return SyncOffer(self._endpoint.rank, CheckpointOffer(str(paths.final)))

    def send(self, plan: SyncPlan, trainer: Trainer) -> int:
        """Write and flush this rank's files; the lead returns when the version is whole."""
        paths = _Paths.of(plan)
        try:
            part = self._write_part(plan, paths, trainer)
            if self._is_lead(plan):
                self._complete(plan, paths)
        except BaseException as error:
            self._publish_failure(paths, error)
            raise
        return part.num_bytes

    def release(self, plan: SyncPlan) -> None:
        """Remove what is unfinished, and whole versions of this role beyond the newest ``keep_versions``.

        Raises:
            WeightSyncError: a directory cannot be removed.
        """
        if not self._is_lead(plan):
            return
        paths = _Paths.of(plan)
        try:
            if paths.staging.exists():
                shutil.rmtree(paths.staging)
            paths.failed.unlink(missing_ok=True)
            for directory in self._versions(paths.final)[self._options.keep_versions :]:
                shutil.rmtree(directory)
        except OSError as error:
            raise WeightSyncError(f"{plan.workspace}: cannot remove old weights: {error}") from error

    def close(self) -> None:
        """Nothing is held between syncs; the newest versions stay for replicas that come back."""

    def _is_lead(self, plan: SyncPlan) -> bool:
        return self._endpoint.rank == plan.senders[0].rank

    def _write_part(self, plan: SyncPlan, paths: _Paths, trainer: Trainer) -> WeightIndex:
        where = f"{describe(plan, 'checkpoint')}, sender {describe_endpoint(self._endpoint)}"
        check = StreamCheck(plan.manifest, where)
        limit = min(bucket_limit(plan), self._options.max_shard_mb << 20)
        rank = self._endpoint.rank
        files: dict[str, FileEntry] = {}
        tensors: dict[str, TensorEntry] = {}
        for number, bucket in enumerate(buckets(stream(plan, trainer), rank, check, limit)):
            path = paths.staging / f"model-rank{rank:05d}-{number:05d}.safetensors"
            files[path.name], entries = write_shard(path, bucket)
            tensors.update(entries)
        part = WeightIndex(
            plan.sync_id, plan.policy_version, self._endpoint.role, files, tensors, plan.manifest.aliases
        )
        write_index(paths.staging, part, paths.part(rank).name)
        return part

    def _complete(self, plan: SyncPlan, paths: _Paths) -> None:
        self._await_ranks(plan, paths)
        part_paths = [paths.part(sender.rank) for sender in plan.senders]
        index = merge_indexes(read_index(path.parent, path.name) for path in part_paths)
        missing = sorted(set(plan.manifest.tensors) - set(index.tensors))
        if missing:
            raise WeightSyncError(
                f"{describe(plan, 'checkpoint')}: {len(missing)} of {len(plan.manifest.tensors)} tensors were not "
                f"streamed by any rank: {name_list(missing)}"
            )
        write_hugging_face_index(paths.staging, index)
        write_index(paths.staging, index)
        try:
            for path in part_paths:
                path.unlink()
            sync_directory(paths.staging)
            paths.staging.rename(paths.final)
            sync_directory(paths.final.parent)
        except OSError as error:
            raise write_error(paths.final, error) from error

    def _await_ranks(self, plan: SyncPlan, paths: _Paths) -> None:
        deadline = time.monotonic() + plan.timeout_s
        while True:
            absent = [sender.rank for sender in plan.senders if not paths.part(sender.rank).exists()]
            if not absent:
                return
            _raise_if_failed(plan, paths)
            if time.monotonic() > deadline:
                raise BackendTimeoutError(
                    f"{describe(plan, 'checkpoint')}: sender {describe_endpoint(self._endpoint)} waited "
                    f"{plan.timeout_s:g} s (weight_sync.timeout_s) for sender ranks {absent} to write into "
                    f"{paths.staging}"
                )
            time.sleep(POLL_S)

    def _publish_failure(self, paths: _Paths, error: BaseException) -> None:
        text = f"sender {describe_endpoint(self._endpoint)}: {type(error).__name__}: {error}"
        try:
            partial = paths.failed.with_name(paths.failed.name + ".partial")
            partial.write_text(text)
            partial.replace(paths.failed)
        except OSError as second:
            error.add_note(
                f"The other ends could not be told through {paths.failed} ({second}); they wait until their timeout."
            )

    def _versions(self, current: Path) -> list[Path]:
        """Whole versions of this role in the workspace, newest first; the current one is the newest."""
        found: list[tuple[bool, int, Path]] = []
        for index_path in current.parent.glob(f"*/{INDEX_NAME}"):
            directory = index_path.parent
            if read_index(directory).role == self._endpoint.role:
                found.append((directory == current, index_path.stat().st_mtime_ns, directory))
        return [directory for _, _, directory in sorted(found, reverse=True)]


class CheckpointReceiver:
    """Waits for a whole version, verifies it and lets the generator read it."""

    def __init__(self, options: CheckpointOptions, endpoint: Endpoint) -> None:
        self._options = options
        self._endpoint = endpoint

    async def receive(self, plan: SyncPlan, offers: Sequence[SyncOffer], loader: WeightLoader) -> int:
        """Load the version with ``loader.load_checkpoint``. Without offers (a replay) the plan says where it is."""
        paths = _Paths.of(plan)
        directory = self._directory(plan, offers, paths)
        await self._await_version(plan, directory, paths)
        index = read_index(directory)
        self._check_index(plan, directory, index)
        await asyncio.to_thread(verify_files, directory, index, checksums=self._options.verify_checksums)
        await loader.load_checkpoint(directory)
        return index.num_bytes

    def close(self) -> None:
        """Nothing is held between syncs."""

    def _directory(self, plan: SyncPlan, offers: Sequence[SyncOffer], paths: _Paths) -> Path:
        for offer in offers:
            if not isinstance(offer.content, CheckpointOffer):
                raise WeightSyncError(
                    f"{describe(plan, 'checkpoint')}: sender rank {offer.sender_rank} offered a "
                    f"{type(offer.content).__name__}, which is not an offer of 'checkpoint'; both ends must be given "
                    f"the same transport"
                )
            if offer.content.directory != str(paths.final):
                raise WeightSyncError(
                    f"{describe(plan, 'checkpoint')}: sender rank {offer.sender_rank} offered "
                    f"{offer.content.directory}, the plan says {paths.final}"
                )
        return paths.final

    async def _await_version(self, plan: SyncPlan, directory: Path, paths: _Paths) -> None:
        deadline = time.monotonic() + plan.timeout_s
        while not (directory / INDEX_NAME).exists():
            _raise_if_failed(plan, paths)
            if time.monotonic() > deadline:
                ranks = [sender.rank for sender in plan.senders]
                raise BackendTimeoutError(
                    f"{describe(plan, 'checkpoint')}: receiver {describe_endpoint(self._endpoint)} waited "
                    f"{plan.timeout_s:g} s (weight_sync.timeout_s) for sender ranks {ranks} to complete {directory}. "
                    f"If they did, this host does not see their disk: put output_dir on a shared one"
                )
            await asyncio.sleep(POLL_S)

    def _check_index(self, plan: SyncPlan, directory: Path, index: WeightIndex) -> None:
        where = f"{describe(plan, 'checkpoint')}: {directory / INDEX_NAME}"
        if (index.sync_id, index.policy_version) != (plan.sync_id, plan.policy_version):
            raise WeightSyncError(
                f"{where} is of sync {index.sync_id!r}, policy version {index.policy_version}; the plan says "
                f"{plan.sync_id!r}, {plan.policy_version}"
            )
        differences = plan.manifest.differences(index.manifest())
        if differences:
            raise WeightSyncError(f"{where} is not what the plan's manifest says: {name_list(differences)}")


def _raise_if_failed(plan: SyncPlan, paths: _Paths) -> None:
    if paths.failed.exists():
        raise WeightSyncError(f"{describe(plan, 'checkpoint')}: ended on the sender's side: {paths.failed.read_text()}")
