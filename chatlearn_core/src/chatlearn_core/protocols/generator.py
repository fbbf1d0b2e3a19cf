"""The generator: samples completions, one coroutine a request, and takes new weights."""

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
"""``(start, token_ids)``: completion tokens from position ``start`` on have been sampled."""


@runtime_checkable
class WeightLoader(Protocol):
    """The receiving side of one generator replica, which a transport's receiver drives.

    Between ``begin`` and ``finish`` the replica is ``loading`` and serves nothing. A receiver calls only the ``load_*``
    methods of the channel that the transport named and the generator declared.
    """

    def expected_manifest(self) -> WeightManifest:
        """What the model directory says must arrive, tied names as aliases."""

    async def begin(self, policy_version: int, manifest: WeightManifest) -> None:
        """Check the manifest by name, shape and dtype and stop serving.

        Raises:
            WeightSyncError: the manifest does not match; nothing has changed.
        """

    async def load_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Channel ``tensors``: take whole tensors, in any order and any number of calls.

        The tensors live until the call returns: copy them, keep none. A transport uses their memory again for the next
        bucket, and in one process they may be the trainer's own parameters, which it goes on to update.
        """

    async def load_boxes(self, shards: Iterable[WeightShard]) -> None:
        """Channel ``boxes``: take parts of tensors; together they cover every tensor exactly once. They live until the
        call returns, as in ``load_tensors``.
        """

    async def load_checkpoint(self, directory: Path) -> None:
        """Channel ``checkpoint``: read safetensors from a directory."""

    async def finish(self) -> int:
        """Check that everything arrived, drop caches that hold the old weights, serve; return the version served.

        Raises:
            WeightSyncError: a tensor did not arrive; the replica is dead.
        """

    async def fail(self, reason: str) -> None:
        """Give up: the replica is dead until it is restarted and holds a whole version."""


@runtime_checkable
class MemoryHandleLoader(WeightLoader, Protocol):
    """A loader of channel ``memory_handles``: for engines in another process, which then read a bucket where the sender
    put it instead of being sent a copy.
    """

    async def load_handles(self, handle: MemoryHandle) -> None:
        """Take the tensors of one block; when this returns, nothing refers to the block any more."""


@runtime_checkable
class ProcessGroupLoader(WeightLoader, Protocol):
    """A loader of channel ``process_group``: the engine's own processes receive from the senders' broadcasts.

    A generator that declares it takes ``tensors``, too: several replicas and several senders at a time are served so.
    """

    @property
    def num_group_ranks(self) -> int:
        """How many processes of this replica join a group, one for each rank of its engine."""

    async def join_group(self, rendezvous: GroupRendezvous) -> None:
        """Meet the sender; returns when the group stands. Groups outlive a sync; joining one again does nothing."""

    async def load_broadcast(
        self, group: str, tensors: Sequence[TensorSpec], checksums: Sequence[int] | None = None
    ) -> None:
        """Receive these tensors from rank 0 of a joined group. Calls for different groups may overlap.

        They come in one broadcast of a flat uint8 tensor: the tensors' bytes in the given order, without gaps; wider
        element types are given first, so that every tensor is aligned.

        Args:
            checksums: ``chatlearn_hosting.engine_side.checksums.checksum`` of each tensor as the sender has it;
                None: nothing is compared.

        Raises:
            BackendTimeoutError: the sender did not send within the group's timeout.
            WeightSyncError: a tensor is not what was sent; names it.
        """

    async def leave_group(self, group: str) -> None:
        """Leave one group; a group that was never joined is no error."""


@runtime_checkable
class Generator(Lifecycle, Protocol):
    """One object a replica. Its coroutines run on one event loop; ``setup`` and ``close`` may block."""

    @property
    def policy_version(self) -> int:
        """Version of the weights being served; 0 for those of the model directory."""

    @property
    def state(self) -> ReplicaState: ...

    @property
    def loader(self) -> WeightLoader: ...

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """Sample one completion. Concurrent calls are batched.

        Requests that are submitted before control returns to the event loop are scheduled in the order of their
        submission, so that a batch does not depend on timing.

        Args:
            on_tokens: called on the event loop as tokens appear (streaming), where the generator declares it.

        Raises:
            BackendError: the prompt does not fit, the replica is not serving, or the engine failed; names the request.
            BackendTimeoutError: ``request.timeout_s`` passed; what was sampled is lost for this call.
        """

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        """End these requests (None: all). Their ``generate`` calls return what was sampled, finish reason ``abort``."""

    async def pause(self) -> None:
        """Stop sampling. Returns when nothing is running any more; unfinished requests, and those that come meanwhile,
        wait for ``resume``.
        """

    async def resume(self) -> None:
        """Go on after ``pause``."""
