"""What every backend object has in common: it is built from a context, set up, checked, moved aside and closed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, runtime_checkable

if TYPE_CHECKING:
    from chatlearn_core.protocols.role_handle import RoleHandle

Head = Literal["lm", "value", "reward"]
MemoryPart = Literal["weights", "gradients", "optimizer", "kv_cache"]
MEMORY_PARTS: tuple[MemoryPart, ...] = get_args(MemoryPart)
"""What can be offloaded: trainers hold the first three, generators ``weights`` and ``kv_cache``."""


@dataclass(slots=True, frozen=True)
class ModelSource:
    """Which model a role holds."""

    path: str
    """A Hugging Face model directory, or a hub id where there is a network."""
    tokenizer_path: str
    head: Head = "lm"
    max_length: int | None = None
    """Longest sequence the run may form, tokens; None takes it from the model's configuration."""
    trust_remote_code: bool = False
    vocab_size: int | None = None
    """Rows of its embedding: token ids are below it. None: unknown."""


@dataclass(slots=True, frozen=True)
class RoleContext:
    """Where one rank of one replica of a role finds itself. The runtime makes it; the backend's factory receives it.

    A factory is called as ``factory(options, context)`` with an instance of the options model its plugin record
    names; it stores both and touches no device before ``setup``.
    """

    role: str
    model: ModelSource | None = None
    replica: int = 0
    rank: int = 0
    world_size: int = 1
    device: str = "cpu"
    """``cpu``, ``cuda`` or ``cuda:N``, already resolved from ``auto``."""
    seed: int = 0
    trainable: bool = False
    """False for a trainer that only computes (a reference): it needs no optimizer."""
    total_updates: int | None = None
    """Optimizer steps the whole run will make, for schedules; None if open."""
    rendezvous: str | None = None
    """``tcp://host:port`` for the ranks of this replica, if it has several: ``chatlearn_hosting.rendezvous.meet``."""
    rendezvous_secret: str | None = field(default=None, repr=False)
    """What the ranks know each other by at the rendezvous; None where it is on loopback."""
    engine_arguments: dict[str, Any] = field(default_factory=dict)
    """Engine-native arguments, passed through verbatim after the backend checked them."""
    handles: Mapping[str, RoleHandle] = field(default_factory=dict)
    """Of a reward: the roles that it calls, by the handles of its record (``RewardSpec.uses``)."""


@runtime_checkable
class Lifecycle(Protocol):
    """The life of a backend object: ``setup``, work, ``close``."""

    def setup(self) -> None:
        """Load the model or start the engine. Called once, in the process that hosts the backend.

        Raises:
            ModelError: the model directory cannot be used.
            BackendError: the engine does not start; the message holds its own words.
        """

    def health(self) -> str | None:
        """None while the backend can work, otherwise what is wrong, without a full stop at its end.

        A runtime asks when a call failed or has no answer, and puts the words into its error: from any thread, while
        another call runs or hangs. It answers at once.
        """

    def offload(self, parts: Collection[MemoryPart]) -> None:
        """Move these parts out of device memory; parts this backend does not hold are ignored, and so are those that
        are away. When it returns the memory is free for other processes.
        """

    def onload(self, parts: Collection[MemoryPart]) -> None:
        """Bring these parts back, those that are away; values are unchanged, except a KV cache, which comes back
        empty.
        """

    def close(self) -> None:
        """Release everything: processes, shared memory, ports, files. Calling it twice is fine."""


Factory = Callable[..., Any]
"""``factory(options, context) -> backend object``"""
