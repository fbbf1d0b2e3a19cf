"""Checks of the weights that a generator receives: names, shapes and dtypes, each tensor once, before any transfer.

Engines silently accept unknown names and crash on wrong shapes, so every loader keeps this record of its sync.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from chatlearn_core.exceptions import ModelError, WeightSyncError
from chatlearn_core.types import BoxCover, TensorPlace, TensorSpec, WeightManifest, WeightShard
from chatlearn_core.types.boxes import box_text, extent
from chatlearn_generator_kit.sync_dtype import SyncDtype
from chatlearn_hf.checkpoint_names import SAFETENSORS_DTYPES, dtype_name
from chatlearn_hf.model_directory import weight_files

_MAX_LINES = 10
"""Number of differences that an error lists; it counts the rest."""


class LoadingReplica(Protocol):
    """The interface of its replica that a loader needs."""

    @property
    def name(self) -> str:
        """Role and replica, for messages."""

    @property
    def is_dead(self) -> bool: ...

    @property
    def weights_are_offloaded(self) -> bool: ...

    async def stop_serving(self) -> None:
        """Enter the state ``loading``; return when sampling has stopped. Running requests are kept."""

    async def serve(self, policy_version: int) -> None:
        """Enter the state ``serving`` under the new weights."""

    async def die(self, reason: str, cause: BaseException | None = None) -> None:
        """Enter the state ``dead``: every request fails."""


def require_ready(replica: LoadingReplica, policy_version: int) -> None:
    """Check that the replica can take weights.

    Raises:
        WeightSyncError: the replica is dead, or its weights are offloaded.
    """
    if replica.is_dead:
        raise WeightSyncError(f"{replica.name} is dead; restart it before the sync of version {policy_version}")
    if replica.weights_are_offloaded:
        raise WeightSyncError(
            f"{replica.name} has its weights offloaded; onload 'weights' before version {policy_version}"
        )


def require_payload(
    replica: LoadingReplica, policy_version: int, manifest: WeightManifest, *, takes_adapters: bool
) -> None:
    """Check that the offered payload (LoRA adapter or whole model) is the one the replica's engine was started for.

    Raises:
        WeightSyncError: it is the other payload.
    """
    if takes_adapters != (manifest.adapter is not None):
        raise WeightSyncError(
            f"{replica.name} cannot take policy version {policy_version}: "
            + (
                "it serves LoRA adapters (options.lora), but the sync offers a whole model; set weight_sync.payload to"
                " adapter, or remove options.lora"
                if takes_adapters
                else "it serves whole models, but the sync offers a LoRA adapter; set options.lora, or"
                " weight_sync.payload to full"
            )
        )


class IncomingWeights:
    """One replica's record of a sync: what its model needs, what was announced, what has arrived.

    Call ``begin``, then ``checked`` or ``check_specs`` any number of times, then ``finish``; ``reset`` at any time.
    """

    def __init__(self, replica: str, expected: WeightManifest, *, sync_dtype: SyncDtype = "exact") -> None:
        """Start without an open sync.

        Args:
            replica: role, replica and backend, for messages.
            expected: manifest of the model directory; all its tensors must arrive.
            sync_dtype: the dtypes that may be offered; the loader casts.
        """
        self.expected = expected
        self._replica = replica
        self._sync_dtype = sync_dtype
        self._version: int | None = None
        self._offered: WeightManifest | None = None
        self._needed: WeightManifest = expected
        self._arrived: set[str] = set()
        self._covers: dict[str, BoxCover] = {}
        """name -> the boxes that have arrived, for tensors that arrive in boxes and are incomplete."""

    @property
    def version(self) -> int | None:
        """Policy version of the open sync; None between syncs."""
        return self._version

    @property
    def offered(self) -> WeightManifest | None:
        """Manifest that the open sync announced; None between syncs."""
        return self._offered

    @property
    def num_arrived(self) -> int:
        """Number of complete tensors in the open sync."""
        return len(self._arrived)

    def begin(self, policy_version: int, manifest: WeightManifest) -> None:
        """Open a sync. For an ``adapter`` payload the offered manifest itself defines what must arrive.

        Raises:
            WeightSyncError: another sync is open, or the manifest does not fit the model; the record is unchanged.
        """
        if self._version is not None:
            raise WeightSyncError(
                f"{self._replica} is loading version {self._version}; finish or fail it before version {policy_version}"
            )
        needed = self.expected if manifest.adapter is None else manifest
        lines = needed.differences(
            _rounded(manifest, needed) if self._sync_dtype == "auto" else manifest,
            check_dtype=self._sync_dtype != "convert",
        )
        if lines:
            shown = "\n".join(f"  {line}" for line in lines[:_MAX_LINES])
            more = f"\n  and {len(lines) - _MAX_LINES} more" if len(lines) > _MAX_LINES else ""
            convert = "; a dtype may differ with the generator's option sync_dtype: convert"
            hint = "" if self._sync_dtype == "convert" else convert
            raise WeightSyncError(
                f"{self._replica} cannot take policy version {policy_version}: {len(lines)} tensors differ from the "
                f"model directory{hint}\n{shown}{more}"
            )
        self.reset()
        self._version, self._offered, self._needed = policy_version, manifest, needed

    def require_begun(self, method: str) -> int:
        """Return the version of the open sync.

        Raises:
            WeightSyncError: no sync is open; the message names ``method``.
        """
        if self._version is None:
            raise WeightSyncError(f"{self._replica}: {method} without begin")
        return self._version

    def checked(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Check tensors and yield them once each, under the names of the model's manifest.

        A tied tensor that arrives under its second name in addition to its first is skipped.

        Raises:
            WeightSyncError: a name, shape or dtype differs from the one ``begin`` announced, or a name came twice.
        """
        for offered_name, tensor in tensors:
            spec = TensorSpec(offered_name, tuple(tensor.shape), dtype_name(tensor.dtype))
            name = self._admit(spec)
            if name is not None:
                yield name, tensor

    def checked_boxes(self, shards: Iterable[WeightShard]) -> Iterator[WeightShard]:
        """Check boxes of tensors and yield them, each element once, under the names of the model's manifest.

        Boxes of a tied tensor that arrives under its second name in addition to its first are skipped.

        Raises:
            WeightSyncError: a name, shape or dtype differs from the one ``begin`` announced, or an element came twice.
        """
        for shard in shards:
            spec = TensorSpec(shard.name, shard.global_shape, dtype_name(shard.tensor.dtype))
            name = self._announced(spec)
            if tuple(shard.tensor.shape) != extent(shard.box):
                raise WeightSyncError(
                    f"{name}: shape {list(shard.tensor.shape)} arrived for the box {box_text(shard.box)}"
                )
            if self._is_second_name(shard.name, name):
                continue
            if name in self._arrived:
                raise WeightSyncError(f"{name}: box {box_text(shard.box)} arrived after the tensor was complete")
            cover = self._covers.setdefault(name, BoxCover(shard.global_shape))
            refusal = cover.add(shard.box)
            if refusal is not None:
                raise WeightSyncError(f"{name}: {refusal}")
            if cover.is_complete:
                del self._covers[name]
                self._arrived.add(name)
            yield replace(shard, name=name)

    def check_specs(self, specs: Sequence[TensorSpec]) -> list[TensorSpec | None]:
        """Check tensors before transfer. Returns each with the name to load it under; None means skip it.

        Raises:
            WeightSyncError: see ``checked``. Then none of these tensors counts as arrived.
        """
        before = set(self._arrived)
        try:
            names = [self._admit(spec) for spec in specs]
        except WeightSyncError:
            self._arrived = before
            raise
        return [
            None if name is None else TensorSpec(name, spec.shape, spec.dtype)
            for name, spec in zip(names, specs, strict=True)
        ]

    # Descriptions of tensors that an engine in another process reads itself, in plain builtins

    def check_places(self, places: Sequence[TensorPlace]) -> list[tuple[str, str, list[int], int]]:
        """Return (name to load, dtype, shape, offset) of the tensors to load from a block.

        Example: ``[("lm_head.weight", "bfloat16", [32000, 4096], 0)]``.

        Raises:
            WeightSyncError: see ``check_specs``.
        """
        names = self.check_specs([place.spec for place in places])
        return [
            (name.name, place.spec.dtype, list(place.spec.shape), place.offset)
            for place, name in zip(places, names, strict=True)
            if name is not None
        ]

    def check_broadcast(self, specs: Sequence[TensorSpec]) -> list[tuple[str, str, list[int]]]:
        """Return (name to load, dtype, shape) of every tensor in a broadcast; an empty name means receive and discard
        it.

        Raises:
            WeightSyncError: see ``check_specs``.
        """
        names = self.check_specs(specs)
        return [
            ("" if name is None else name.name, spec.dtype, list(spec.shape))
            for name, spec in zip(names, specs, strict=True)
        ]

    def check_checkpoint(self, directory: Path) -> list[tuple[str, list[tuple[str, str]]]]:
        """Return (file, [(name in the file, name to load)]) of a directory's weight files.

        Raises:
            WeightSyncError: see ``check_specs``; or a file is missing or damaged.
        """
        files = []
        for file, specs in checkpoint_headers(directory):
            names = self.check_specs(specs)
            pairs = [(spec.name, name.name) for spec, name in zip(specs, names, strict=True) if name is not None]
            files.append((str(file), pairs))
        return files

    def finish(self) -> int:
        """Close the sync and return its version.

        Raises:
            WeightSyncError: no sync is open, or a tensor did not arrive; the sync stays open.
        """
        version = self.require_begun("finish")
        missing = [self._missing_part(name) for name in sorted(self._needed.tensors.keys() - self._arrived)]
        if missing:
            shown = ", ".join(missing[:_MAX_LINES])
            more = f" and {len(missing) - _MAX_LINES} more" if len(missing) > _MAX_LINES else ""
            raise WeightSyncError(
                f"{self._replica}: {len(missing)} of {len(self._needed.tensors)} tensors of policy version {version} "
                f"did not arrive: {shown}{more}; the replica is dead, restart it"
            )
        self.reset()
        return version

    def reset(self) -> None:
        """Discard the open sync, if there is one."""
        self._version, self._offered, self._arrived, self._covers = None, None, set(), {}
        self._needed = self.expected

    def _missing_part(self, name: str) -> str:
        """Return the name of an incomplete tensor, with its missing elements if some boxes have arrived."""
        cover = self._covers.get(name)
        if cover is None:
            return name
        return f"{name} (elements {', '.join(box_text(box) for box in cover.missing()[:3])})"

    def _admit(self, spec: TensorSpec) -> str | None:
        """Record a tensor. Returns the name to load it under; None for a tied tensor under its second name."""
        name = self._announced(spec)
        if self._is_second_name(spec.name, name):
            return None
        if name in self._arrived or name in self._covers:
            raise WeightSyncError(f"{name}: arrived twice")
        self._arrived.add(name)
        return name

    def _is_second_name(self, offered: str, name: str) -> bool:
        """Whether a tensor arrives under a tied name in addition to its own."""
        assert self._offered is not None, "checked without begin"
        return offered != name and name in self._offered.tensors

    def _announced(self, spec: TensorSpec) -> str:
        """Check a tensor against the announcement. Returns its name in the model's manifest."""
        assert self._offered is not None, "checked without begin"
        name = self._needed.aliases.get(spec.name, spec.name)
        announced = self._offered.tensors.get(self._offered.aliases.get(spec.name, spec.name))
        if announced is None or name not in self._needed.tensors:
            raise WeightSyncError(f"{spec.name}: arrived, but the manifest did not announce it")
        if spec.shape != announced.shape:
            raise WeightSyncError(f"{name}: shape {list(spec.shape)} arrived, {list(announced.shape)} announced")
        if spec.dtype != announced.dtype:
            raise WeightSyncError(f"{name}: dtype {spec.dtype} arrived, {announced.dtype} announced")
        return name


def _rounded(offered: WeightManifest, needed: WeightManifest) -> WeightManifest:
    """Return the manifest with bfloat16 for the float32 tensors of which bfloat16 is needed."""
    names = {name: needed.aliases.get(name, name) for name in offered.tensors}
    wanted = {name: needed.tensors[target].dtype for name, target in names.items() if target in needed.tensors}
    tensors = {
        name: replace(spec, dtype="bfloat16") if (spec.dtype, wanted.get(name)) == ("float32", "bfloat16") else spec
        for name, spec in offered.tensors.items()
    }
    return replace(offered, tensors=tensors)


def names_tied_to(manifest: WeightManifest) -> dict[str, list[str]]:
    """Return name -> its second names, for engines that hold tied tensors separately."""
    tied: dict[str, list[str]] = {}
    for alias, name in manifest.aliases.items():
        tied.setdefault(name, []).append(alias)
    return tied


def read_checkpoint(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a directory with one ``model.safetensors``, or with the files that its index names.

    Raises:
        WeightSyncError: a file is missing or damaged.
    """
    for file in _weight_files(directory):
        with _opened(file) as handle:
            for name in handle.keys():  # noqa: SIM118  # a safetensors handle cannot be iterated
                yield name, handle.get_tensor(name)


def checkpoint_headers(directory: Path) -> Iterator[tuple[Path, list[TensorSpec]]]:
    """Yield each weight file of a directory with the tensors in its header; reads no weights.

    Raises:
        WeightSyncError: a file is missing or damaged.
    """
    for file in _weight_files(directory):
        specs = []
        with _opened(file) as handle:
            for name in handle.keys():  # noqa: SIM118  # as above
                header = handle.get_slice(name)
                dtype = SAFETENSORS_DTYPES.get(header.get_dtype(), header.get_dtype().lower())
                specs.append(TensorSpec(name, tuple(header.get_shape()), dtype))
        yield file, specs


def _weight_files(directory: Path) -> list[Path]:
    try:
        return list(weight_files(directory))
    except (ModelError, OSError) as error:
        raise WeightSyncError(f"checkpoint {directory} cannot be read: {error}") from error


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise WeightSyncError(f"{file} is truncated or not a safetensors file: {error}") from error
