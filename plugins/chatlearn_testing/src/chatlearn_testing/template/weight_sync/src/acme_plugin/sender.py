"""The trainer's end of the transport ``acme``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_core.protocols import Trainer
from chatlearn_core.types import Endpoint, SyncOffer, SyncRequest

from acme_plugin.buckets import COPIES, Bucket, FilesOffer, RankFiles, check_tensor
from acme_plugin.options import AcmeOptions


class AcmeSender:
    """Writes the tensors that this rank owns into files, bucket by bucket, while receivers read them.

    Implements ``chatlearn_core.protocols.WeightSender``.
    """

    def __init__(self, options: AcmeOptions, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._open: dict[str, RankFiles] = {}

    def offer(self, plan: SyncRequest) -> SyncOffer:
        """Create the directory that receivers watch.

        Raises:
            WeightSyncError: the workspace cannot be written.
        """
        files = RankFiles(Path(plan.workspace) / plan.sync_id, self.endpoint.rank)
        try:
            files.directory.mkdir(parents=True, exist_ok=True)
            files.clear()
        except OSError as error:
            raise WeightSyncError(
                f"{self._where(plan)}: {files.directory} cannot be prepared: {error}; the run's directory must be "
                "writable for the trainer and on a disk that the generators share"
            ) from error
        self._open[plan.sync_id] = files
        return SyncOffer(self.endpoint.rank, FilesOffer(str(files.directory)))

    def send(self, plan: SyncRequest, trainer: Trainer) -> int:
        """Write every bucket, then the end marker; after a failure, write the failure marker for waiting receivers."""
        files = self._open.get(plan.sync_id)
        if files is None:
            raise WeightSyncError(f"{self._where(plan)}: send was called without an open offer")
        count, sent = 0, 0
        try:
            for bucket in self._buckets(plan, trainer):
                if plan.sync_id not in self._open:
                    raise WeightSyncError(f"{self._where(plan)}: the sync was released before everything was sent")
                files.publish_bucket(count, bucket)
                count += 1
                sent += sum(tensor.nbytes for tensor in bucket.values())
            files.publish(files.end, str(count).encode())
        except Exception as error:
            if files.directory.exists():
                files.publish(files.failed, f"{type(error).__name__}: {error}".encode())
            if isinstance(error, OSError):
                raise WeightSyncError(f"{self._where(plan)}: {files.directory} cannot be written: {error}") from error
            raise
        return sent

    def release(self, plan: SyncRequest) -> None:
        """Delete this rank's files."""
        files = self._open.pop(plan.sync_id, None)
        if files is not None:
            files.remove()

    def close(self) -> None:
        """Delete the files of syncs that were never released."""
        while self._open:
            _, files = self._open.popitem()
            files.remove()

    def _buckets(self, plan: SyncRequest, trainer: Trainer) -> Iterator[Bucket]:
        """Yield this rank's tensors in buckets within the memory limit; a larger tensor forms a bucket alone.

        Every rank must run the stream to its end, because each step may be a collective.
        """
        limit = plan.bucket_bytes // COPIES
        bucket: Bucket = {}
        held = 0
        for shard in trainer.weights("full_tensors"):
            if shard.owner_rank != self.endpoint.rank:
                continue
            check_tensor(shard.name, shard.tensor, plan.manifest, self._where(plan))
            if bucket and held + shard.tensor.nbytes > limit:
                yield bucket
                bucket, held = {}, 0
            # A copy, because safetensors refuses views of larger tensors.
            bucket[shard.name] = shard.tensor.detach().to("cpu", copy=True).contiguous()
            held += shard.tensor.nbytes
        if bucket:
            yield bucket

    def _where(self, plan: SyncRequest) -> str:
        place = f"sender rank {self.endpoint.rank}"
        return f"weight sync {plan.sync_id!r} over 'acme', {place}"
