"""The generator's end of ``delta``: updates a copy of the weights and passes all of it to the generator."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_core.protocols import MemoryHandleLoader, WeightLoader
from chatlearn_core.types import Endpoint, MemoryHandle, SyncOffer, SyncRequest, TensorPlace, WeightManifest
from chatlearn_hosting.engine_side.checksums import checksum
from chatlearn_hosting.shared_block import ALIGNMENT, SharedBlock
from chatlearn_sync.changes import apply, tensor_of
from chatlearn_sync.delta import NAME
from chatlearn_sync.options import DeltaOptions
from chatlearn_sync.shared_memory import Mapping, view_of
from chatlearn_sync.stream import describe, describe_endpoint, name_list
from chatlearn_sync.version_directory import VersionDirectory
from chatlearn_sync.weight_files import INDEX_NAME, WeightIndex, read_index, verify_files


class Copy:
    """All tensors of a version in one block of shared memory, so that an engine in another process can read them."""

    def __init__(self, manifest: WeightManifest) -> None:
        self.manifest = manifest
        self.sync_id: str | None = None
        """Sync whose version the tensors hold; None before the first version and during an update."""
        places: list[TensorPlace] = []
        used = 0
        for spec in manifest.tensors.values():
            places.append(TensorPlace(spec, used))
            used += -(-spec.num_bytes // ALIGNMENT) * ALIGNMENT
        self._block = SharedBlock(max(1, used))
        contents = Mapping(self._block.path, self._block.num_bytes).contents
        self.tensors = {place.spec.name: view_of(contents, place) for place in places}
        self.handle = MemoryHandle("file", self._block.path, self._block.num_bytes, tuple(places))

    def close(self) -> None:
        """Drop the tensors; the memory is freed once the engine has unmapped it."""
        self.tensors = {}
        self._block.close()


class DeltaReceiver:
    """Brings its copy up to date: applies the new version, after any earlier ones that it missed."""

    def __init__(self, options: DeltaOptions, endpoint: Endpoint) -> None:
        self._options = options
        self._endpoint = endpoint
        self._copy: Copy | None = None

    async def receive(self, plan: SyncRequest, offers: Sequence[SyncOffer], loader: WeightLoader) -> int:
        """Load the version; returns the bytes read from disk. Without offers (a replay), the plan alone locates it."""
        version = VersionDirectory(plan, NAME, self._endpoint)
        version.require_offers(offers)
        index = await version.arrival()
        copy = self._copy_for(plan)
        missing = await asyncio.to_thread(self._missing, plan, version.final, index, copy)
        await asyncio.to_thread(self._update, plan, copy, missing)
        if plan.channel == "memory_handles":
            assert isinstance(loader, MemoryHandleLoader), "the generator declares 'memory_handles'"
            await loader.load_handles(copy.handle)
        else:
            await loader.load_tensors(iter(copy.tensors.items()))
        return sum(index.num_bytes for _, index in missing)

    def close(self) -> None:
        """Free the copy."""
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.close()

    def _copy_for(self, plan: SyncRequest) -> Copy:
        if self._copy is None or self._copy.manifest != plan.manifest:
            self.close()
            self._copy = Copy(plan.manifest)
        return self._copy

    def _missing(
        self, plan: SyncRequest, directory: Path, index: WeightIndex, copy: Copy
    ) -> list[tuple[Path, WeightIndex]]:
        """List the versions to apply to the copy, oldest first; starts with a full one if the copy is not in the chain.

        Raises:
            WeightSyncError: one of them is missing.
        """
        chain = [(directory, index)]
        while (base := chain[-1][1].base) is not None and base != copy.sync_id:
            before = directory.parent / base
            if not (before / INDEX_NAME).exists():
                raise WeightSyncError(
                    f"{self._where(plan)}: version {chain[-1][1].policy_version} in {chain[-1][0]} builds on {before}, "
                    "which is missing. The next full version (weight_sync.options.full_every) will not need it"
                )
            chain.append((before, read_index(before)))
        return chain[::-1]

    def _update(self, plan: SyncRequest, copy: Copy, missing: Sequence[tuple[Path, WeightIndex]]) -> None:
        copy.sync_id = None  # a failure leaves it between two versions
        for directory, index in missing:
            verify_files(directory, index, checksums=self._options.verify_checksums)
            self._apply(plan, copy, directory, index)
        copy.sync_id = plan.sync_id

    def _apply(self, plan: SyncRequest, copy: Copy, directory: Path, index: WeightIndex) -> None:
        if index.base is None and (absent := sorted(set(copy.tensors) - set(index.results))):
            raise WeightSyncError(f"{self._where(plan)}: {directory} is a full version without {name_list(absent)}")
        for file in index.files:
            by_tensor: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
            try:
                for stored, part in load_file(directory / file).items():
                    by_tensor[tensor_of(stored)][stored] = part
            except (OSError, SafetensorError) as error:
                raise WeightSyncError(f"{directory / file} cannot be read: {error}") from error
            for name, parts in by_tensor.items():
                target = copy.tensors.get(plan.manifest.aliases.get(name, name))
                if target is None:
                    raise WeightSyncError(f"{directory / file}: tensor {name!r} is not in the manifest of this sync")
                apply(name, parts, target)
                if self._options.verify_checksums and checksum(target) != index.results[name]:
                    raise WeightSyncError(
                        f"{directory / file}: tensor {name!r} of policy version {index.policy_version} differs from "
                        "the sender's after its delta was applied: the receiver's copy does not hold the version that "
                        "the delta builds on. Restart this replica; it then reads the chain from the full version on"
                    )

    def _where(self, plan: SyncRequest) -> str:
        return f"{describe(plan, NAME)}, receiver {describe_endpoint(self._endpoint)}"
