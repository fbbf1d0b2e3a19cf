"""The generator: samples completions, one coroutine per request, and loads new weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from chatlearn_core.protocols.lifecycle import Lifecycle
from chatlearn_core.types import (
    Completion,
    GenerateRequest,
    GroupRendezvous,
    MemoryHandle,
    ReplicaState,
    TensorSpec,
    WeightManifest,
    WeightShard,
)

OnTokens = Callable[[int, list[int]], None]
"""``(start, token_ids)``: the completion tokens from position ``start`` on, as they are sampled."""


@runtime_checkable
class WeightLoader(Protocol):
    """The receiving side of one generator replica; a transport's receiver calls it.

    Between ``begin`` and ``finish`` the replica is ``loading`` and serves nothing. A receiver calls only the ``load_*``
    method of the channel that the transport named and the generator declared.
    """

    def expected_manifest(self) -> WeightManifest:
        """The tensors that must arrive, according to the model directory, with tied names as aliases.

        Called: before a sync begins, to compare manifests; in each replica's process; once per sync.
        """

    async def begin(self, policy_version: int, manifest: WeightManifest) -> None:
        """Check the manifest by name, shape and dtype and stop serving.

        Called: when the manifests fit; on the event loop of each replica's process; once per sync.

        Raises:
            WeightSyncError: the manifest does not match; nothing has changed.
        """

    async def load_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Channel ``tensors``: load whole tensors, in any order and over any number of calls.

        The tensors are valid only until the call returns: copy them and keep no reference. A transport reuses their
        memory for the next bucket, and in one process they may be the trainer's own parameters, which it updates later.

        Called: by the receiver of a transport of this channel; on the event loop of each replica's process; once per
        bucket.
        """

    async def load_boxes(self, shards: Iterable[WeightShard]) -> None:
        """Channel ``boxes``: load parts of tensors, which together cover every tensor exactly once. They are valid only
        until the call returns, as in ``load_tensors``.

        Called: by the receiver of a transport of this channel; on the event loop of each replica's process; once per
        bucket.
        """

    async def load_checkpoint(self, directory: Path) -> None:
        """Channel ``checkpoint``: load safetensors files from a directory.

        Called: by the receiver of a transport of this channel; on the event loop of each replica's process; once per
        sync.
        """

    async def finish(self) -> int:
        """Check that everything arrived, drop caches of the old weights, and serve; return the version served.

        Called: when the receiver has passed everything on; on the event loop of each replica's process; once per
        sync.

        Raises:
            WeightSyncError: a tensor did not arrive; the replica is then dead.
        """

    async def fail(self, reason: str) -> None:
        """Give up: the replica is dead until it is restarted and has loaded a complete version.

        Called: when any part of a sync failed; on the event loop of each replica's process; at most once per sync.
        """


@runtime_checkable
class MemoryHandleLoader(WeightLoader, Protocol):
    """A loader of channel ``memory_handles``, for engines in another process: they read a bucket in the sender's memory
    instead of receiving a copy.
    """

    async def load_handles(self, handle: MemoryHandle) -> None:
        """Load the tensors of one block; when this returns, no reference to the block remains.

        Called: by the receiver of a transport of this channel; on the event loop of each replica's process; once per
        block.
        """


@runtime_checkable
class ProcessGroupLoader(WeightLoader, Protocol):
    """A loader of channel ``process_group``: the engine's own processes receive the senders' broadcasts.

    A generator that declares it must also accept ``tensors``, which serves several replicas and several senders at a
    time.
    """

    @property
    def num_group_ranks(self) -> int:
        """Number of this replica's processes that join a group: one per rank of its engine.

        Called: before groups form; in each replica's process; once per sync.
        """

    async def join_group(self, rendezvous: GroupRendezvous) -> None:
        """Join the sender's group; returns once it is formed. Groups outlive a sync; joining again does nothing.

        Called: by the receiver, for each sender; on the event loop of each replica's process; once per sync.
        """

    async def load_broadcast(
        self, group: str, tensors: Sequence[TensorSpec], checksums: Sequence[int] | None = None
    ) -> None:
        """Receive these tensors from rank 0 of a joined group. Calls for different groups may overlap.

        They arrive in one broadcast of a flat uint8 tensor: the tensors' bytes in the given order, without gaps. Wider
        element types come first, so that every tensor is aligned.

        Called: by the receiver of a transport of this channel; on the event loop of each replica's process; once per
        bucket.

        Args:
            checksums: the sender's ``chatlearn_hosting.engine_side.checksums.checksum`` of each tensor; with None,
                nothing is compared.

        Raises:
            BackendTimeoutError: the sender did not send within the group's timeout.
            WeightSyncError: a tensor differs from what the sender sent; names it.
        """

    async def leave_group(self, group: str) -> None:
        """Leave one group; leaving a group that was never joined is no error.

        Called: when the receiver closes, or a sync failed; on the event loop of each replica's process; once per
        group.
        """


@runtime_checkable
class Generator(Lifecycle, Protocol):
    """One object per replica. Its coroutines run on one event loop; ``setup`` and ``close`` may block."""

    @property
    def policy_version(self) -> int:
        """Version of the weights being served; 0 means those of the model directory.

        Called: after ``setup``; in each replica's process; any number of times.
        """

    @property
    def state(self) -> ReplicaState:
        """``serving``, ``loading`` or ``dead``.

        Called: after ``setup``; in each replica's process; any number of times.
        """

    @property
    def loader(self) -> WeightLoader:
        """The receiving side of this replica's weight syncs.

        Called: after ``setup``; in each replica's process; once per sync.
        """

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """Sample one completion. Concurrent calls are batched.

        Requests that are submitted before control returns to the event loop are scheduled in the order of submission,
        so that a batch does not depend on timing.

        Called: for each completion; on the event loop of each replica's process; once per sample or turn, and again
        for each resumption and retry.

        Args:
            on_tokens: called on the event loop as tokens are sampled, if the generator declares streaming.

        Raises:
            BackendError: the prompt does not fit, the replica is not serving, or the engine failed; names the request.
            BackendTimeoutError: ``request.timeout_s`` passed; the tokens sampled so far are lost.
        """

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        """End these requests (None: all). Their ``generate`` calls return the tokens so far, finish ``abort``.

        Called: when a step has enough samples, a limit is over or the run ends; on the event loop of each replica's
        process; any number of times.
        """

    async def pause(self) -> None:
        """Stop sampling. Returns once nothing is running. Unfinished requests, and those submitted meanwhile, wait for
        ``resume``.

        Called: before weights change or memory is offloaded; on the event loop of each replica's process; once or
        more per step.
        """

    async def resume(self) -> None:
        """Go on after ``pause``.

        Called: after ``pause``; on the event loop of each replica's process; as often as ``pause``.
        """
