"""A version of the weights as a directory on a shared disk, which appears only once all sender ranks have written it.

In ``plan.workspace`` each sender rank writes its own files into ``{sync_id}.{role}.tmp``. The first rank of the plan,
the lead, waits for the others, checks that nothing is missing, writes the index and renames the directory to
``{sync_id}``, so a directory of that name is always complete. A rank that fails writes its error to
``{sync_id}.failed``, and the other ranks and the receivers stop waiting.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from chatlearn_core.exceptions import BackendTimeoutError, WeightSyncError
from chatlearn_core.types import Endpoint, SyncOffer, SyncRequest
from chatlearn_sync.stream import describe, describe_endpoint
from chatlearn_sync.weight_files import (
    INDEX_NAME,
    WeightIndex,
    merge_indexes,
    read_index,
    sync_directory,
    write_error,
    write_index,
)

POLL_S = 0.02
"""Interval at which a waiting end polls the directory, seconds; a shared disk sends no notifications."""


@dataclass(slots=True, frozen=True)
class DirectoryOffer:
    """Directory of a future version."""

    transport: str
    directory: str
    """Path; exists once the version is complete."""


class VersionDirectory:
    """The directory of one sync, as used by one sender or receiver.

    Args:
        transport: name of the transport, for messages.
        end: this sender or receiver.
    """

    def __init__(self, plan: SyncRequest, transport: str, end: Endpoint) -> None:
        workspace = Path(plan.workspace)
        role = plan.senders[0].role if plan.senders else ""
        self.final = workspace / plan.sync_id
        self.staging = workspace / f"{plan.sync_id}.{role}.tmp"
        self._failed = workspace / f"{plan.sync_id}.failed"
        self._plan = plan
        self._transport = transport
        self._end = end
        self._where = describe(plan, transport)

    @property
    def is_lead(self) -> bool:
        """Whether this sender completes the version."""
        return self._end.rank == self._plan.senders[0].rank

    # Sender methods.

    def open(self) -> SyncOffer:
        """Return the directory's offer; the lead deletes files of an interrupted run with the same names.

        Raises:
            WeightSyncError: the workspace cannot be written.
        """
        if self.is_lead:
            try:
                self.final.parent.mkdir(parents=True, exist_ok=True)
                for directory in (self.final, *self.final.parent.glob(f"*.{self._end.role}.tmp")):
                    if directory.exists():
                        shutil.rmtree(directory)
                self._failed.unlink(missing_ok=True)
                self.staging.mkdir()
            except OSError as error:
                raise write_error(Path(self._plan.workspace), error) from error
        return SyncOffer(self._end.rank, DirectoryOffer(self._transport, str(self.final)))

    def publish(
        self,
        write: Callable[[], WeightIndex],
        finish: Callable[[Sequence[WeightIndex], WeightIndex], WeightIndex],
    ) -> WeightIndex:
        """Write this rank's part; the lead returns when the version is complete. A failure is passed to all other ends.

        Args:
            write: writes this rank's files and returns their index.
            finish: see ``complete``.

        Returns:
            The index of this rank's part.
        """
        try:
            part = write()
            self.write_part(part)
            if self.is_lead:
                self.complete(finish)
        except BaseException as error:
            self.publish_failure(error)
            raise
        return part

    def write_part(self, part: WeightIndex) -> None:
        """Write the index of this rank's part into ``staging``, which marks the part as complete."""
        write_index(self.staging, part, self._part(self._end.rank).name)

    def complete(self, finish: Callable[[Sequence[WeightIndex], WeightIndex], WeightIndex]) -> None:
        """Wait for every rank's part, then rename the directory to its final name; only the lead calls this.

        Args:
            finish: takes the indexes of all parts and their merged index; returns the version's index, or raises.

        Raises:
            WeightSyncError: a rank failed, two ranks wrote the same tensor, or the disk cannot be written.
            BackendTimeoutError: names the ranks whose parts are missing.
        """
        self._await_parts()
        paths = [self._part(sender.rank) for sender in self._plan.senders]
        parts = [read_index(path.parent, path.name) for path in paths]
        write_index(self.staging, finish(parts, merge_indexes(parts)))
        try:
            for path in paths:
                path.unlink()
            sync_directory(self.staging)
            self.staging.rename(self.final)
            sync_directory(self.final.parent)
        except OSError as error:
            raise write_error(self.final, error) from error

    def publish_failure(self, error: BaseException) -> None:
        """Write this rank's error where the other ends look for it."""
        text = f"sender {describe_endpoint(self._end)}: {type(error).__name__}: {error}"
        try:
            partial = self._failed.with_name(self._failed.name + ".partial")
            partial.write_text(text)
            partial.replace(self._failed)
        except OSError as second:
            error.add_note(
                f"This error could not be written to {self._failed} ({second}); the other ends wait until they time "
                "out."
            )

    def tidy(self, keep: Callable[[Sequence[tuple[Path, WeightIndex]]], Collection[Path]]) -> None:
        """Delete unfinished files, and complete versions of this role that ``keep`` omits; does nothing off the lead.

        Args:
            keep: takes (directory, index) of each version, newest first; returns the directories to keep.

        Raises:
            WeightSyncError: a directory cannot be removed.
        """
        if not self.is_lead:
            return
        try:
            if self.staging.exists():
                shutil.rmtree(self.staging)
            self._failed.unlink(missing_ok=True)
            versions = self.versions()
            kept = keep(versions)
            for directory, _ in versions:
                if directory not in kept:
                    shutil.rmtree(directory)
        except OSError as error:
            raise WeightSyncError(f"{self._plan.workspace}: cannot remove old weights: {error}") from error

    def versions(self) -> list[tuple[Path, WeightIndex]]:
        """List (directory, index) of the complete versions of this sender's role, newest first, this sync's first."""
        found: list[tuple[bool, int, Path, WeightIndex]] = []
        for index_path in self.final.parent.glob(f"*/{INDEX_NAME}"):
            directory = index_path.parent
            index = read_index(directory)
            if index.role == self._end.role:
                found.append((directory == self.final, index_path.stat().st_mtime_ns, directory, index))
        found.sort(key=lambda version: version[:3], reverse=True)
        return [(directory, index) for _, _, directory, index in found]

    # Receiver methods.

    def require_offers(self, offers: Sequence[SyncOffer]) -> None:
        """Check that every offer names this directory; a replay has none, and the plan alone locates the version.

        Raises:
            WeightSyncError: an offer comes from another transport, or names another directory.
        """
        for offer in offers:
            content = offer.content
            if not isinstance(content, DirectoryOffer) or content.transport != self._transport:
                raise WeightSyncError(
                    f"{self._where}: sender rank {offer.sender_rank} offered a {type(content).__name__}, which is not "
                    f"an offer of {self._transport!r}; both ends must use the same transport"
                )
            if content.directory != str(self.final):
                raise WeightSyncError(
                    f"{self._where}: sender rank {offer.sender_rank} offered {content.directory}, the plan says "
                    f"{self.final}"
                )

    async def arrival(self) -> WeightIndex:
        """Wait until the version is complete; returns its index.

        Raises:
            WeightSyncError: a sender failed, or the directory belongs to another sync.
            BackendTimeoutError: the version was not complete in time; names the sender ranks.
        """
        plan = self._plan
        deadline = time.monotonic() + plan.timeout_s
        while not (self.final / INDEX_NAME).exists():
            self._raise_if_failed()
            if time.monotonic() > deadline:
                ranks = [sender.rank for sender in plan.senders]
                raise BackendTimeoutError(
                    f"{self._where}: receiver {describe_endpoint(self._end)} waited {plan.timeout_s:g} s "
                    f"(weight_sync.timeout_s) for sender ranks {ranks} to complete {self.final}. If they did, this "
                    "host does not share their disk: set output_dir to a directory on a shared disk"
                )
            await asyncio.sleep(POLL_S)
        index = read_index(self.final)
        if (index.sync_id, index.policy_version) != (plan.sync_id, plan.policy_version):
            raise WeightSyncError(
                f"{self._where}: {self.final / INDEX_NAME} belongs to sync {index.sync_id!r}, policy version "
                f"{index.policy_version}; the plan says {plan.sync_id!r}, {plan.policy_version}"
            )
        return index

    # Internals.

    def _part(self, rank: int) -> Path:
        return self.staging / f"rank-{rank:05d}.json"

    def _await_parts(self) -> None:
        plan = self._plan
        deadline = time.monotonic() + plan.timeout_s
        while True:
            absent = [sender.rank for sender in plan.senders if not self._part(sender.rank).exists()]
            if not absent:
                return
            self._raise_if_failed()
            if time.monotonic() > deadline:
                raise BackendTimeoutError(
                    f"{self._where}: sender {describe_endpoint(self._end)} waited {plan.timeout_s:g} s "
                    f"(weight_sync.timeout_s) for sender ranks {absent} to write into {self.staging}"
                )
            time.sleep(POLL_S)

    def _raise_if_failed(self) -> None:
        if self._failed.exists():
            raise WeightSyncError(f"{self._where}: ended on the sender's side: {self._failed.read_text()}")
