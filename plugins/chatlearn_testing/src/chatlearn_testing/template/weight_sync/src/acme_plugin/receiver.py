"""The generator's end of the transport ``acme``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from chatlearn_core.exceptions import BackendTimeoutError, WeightSyncError
from chatlearn_core.protocols import WeightLoader
from chatlearn_core.types import Endpoint, SyncOffer, SyncRequest

from acme_plugin.buckets import (
    Bucket,
    FilesOffer,
    RankFiles,
    check_tensor,
    read_bucket,
)
from acme_plugin.options import AcmeOptions


class AcmeReceiver:
    """Reads the buckets of all sender ranks as they appear, and passes them to the generator's loader.

    Implements ``chatlearn_core.protocols.WeightReceiver``. The caller of ``receive`` calls the loader's ``begin`` and
    ``finish``.
    """

    def __init__(self, options: AcmeOptions, endpoint: Endpoint) -> None:
        self.options = options
        self.endpoint = endpoint

    async def receive(self, plan: SyncRequest, offers: Sequence[SyncOffer], loader: WeightLoader) -> int:
        """Take every tensor of the manifest exactly once.

        Raises:
            WeightSyncError: a file is damaged, a tensor differs from the manifest, or a sender failed.
            BackendTimeoutError: no new file appeared for ``plan.timeout_s``; names the ranks that have not ended.
        """
        sources = {offer.sender_rank: self._files(plan, offer) for offer in offers}
        next_number = dict.fromkeys(sources, 0)
        arrived: set[str] = set()
        received = 0
        last_news = time.monotonic()
        while sources:
            progress = False
            for rank, files in list(sources.items()):
                path = files.bucket(next_number[rank])
                if path is not None:
                    bucket = await asyncio.to_thread(read_bucket, path)
                    self._check(plan, bucket, arrived)
                    await loader.load_tensors(bucket.items())
                    received += sum(tensor.nbytes for tensor in bucket.values())
                    next_number[rank] += 1
                    progress = True
                elif self._has_ended(plan, rank, files, next_number[rank]):
                    del sources[rank]
                    progress = True
            if progress:
                last_news = time.monotonic()
            elif time.monotonic() - last_news > plan.timeout_s:
                raise BackendTimeoutError(
                    f"{self._where(plan)}: waited {plan.timeout_s:g} s (weight_sync.timeout_s) for ranks "
                    f"{sorted(sources)} of role {plan.senders[0].role!r} to write into {plan.workspace}"
                )
            else:
                await asyncio.sleep(self.options.poll_interval_s)
        if missing := sorted(plan.manifest.tensors.keys() - arrived):
            raise WeightSyncError(
                f"{self._where(plan)}: {len(missing)} tensors were not sent, the first {missing[0]!r}"
            )
        return received

    def close(self) -> None:
        """Do nothing: a receiver holds nothing between syncs."""

    def _files(self, plan: SyncRequest, offer: SyncOffer) -> RankFiles:
        if not isinstance(offer.content, FilesOffer):
            raise WeightSyncError(
                f"{self._where(plan)}: sender rank {offer.sender_rank} offered {offer.content!r}, which is not an "
                "offer of 'acme'; both ends must use the same transport"
            )
        return RankFiles(Path(offer.content.directory), offer.sender_rank)

    def _check(self, plan: SyncRequest, bucket: Bucket, arrived: set[str]) -> None:
        for name, tensor in bucket.items():
            check_tensor(name, tensor, plan.manifest, self._where(plan))
            if name in arrived:
                raise WeightSyncError(f"{self._where(plan)}: tensor {name!r} was sent twice")
            arrived.add(name)

    def _has_ended(self, plan: SyncRequest, rank: int, files: RankFiles, num_read: int) -> bool:
        """Whether a sender has ended and all its buckets were read; raises if it failed."""
        if files.failed.exists():
            raise WeightSyncError(f"{self._where(plan)}: sender rank {rank} failed: {files.failed.read_text()}")
        return files.end.exists() and int(files.end.read_text()) == num_read

    def _where(self, plan: SyncRequest) -> str:
        end = self.endpoint
        place = f"receiver of role {end.role!r} replica {end.replica}"
        return f"weight sync {plan.sync_id!r} over 'acme', {place}"
