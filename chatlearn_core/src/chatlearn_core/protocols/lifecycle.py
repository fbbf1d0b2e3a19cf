"""The common life cycle of backend objects: built from a context, set up, checked, offloaded and closed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, runtime_checkable

if TYPE_CHECKING:
    from chatlearn_core.protocols.role_handle import RoleHandle

Head = Literal["lm", "value", "reward"]
MemoryPart = Literal["weights", "gradients", "optimizer", "kv_cache"]
MEMORY_PARTS: tuple[MemoryPart, ...] = get_args(MemoryPart)
"""Parts that can be offloaded: trainers hold the first three, generators ``weights`` and ``kv_cache``."""


@dataclass(slots=True, frozen=True)
class ModelSource:
    """The model that a role holds."""

    path: str
    """A Hugging Face model directory, or a hub id if there is a network."""
    tokenizer_path: str
    head: Head = "lm"
    max_length: int | None = None
    """Longest sequence that the run may form, tokens; None takes it from the model's configuration."""
    trust_remote_code: bool = False
    vocab_size: int | None = None
    """Rows of the model's embedding: token ids are smaller. None means unknown."""


@dataclass(slots=True, frozen=True)
class RoleContext:
    """The position and resources of one rank of one replica of a role. The runtime makes it for the backend's factory.

    A factory is called as ``factory(options, context)`` with an instance of the options model named in its plugin
    record; it stores both and touches no device before ``setup``.
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
    """Number of optimizer steps in the whole run, for schedules; None if unknown."""
    rendezvous: str | None = None
    """``tcp://host:port`` where this replica's ranks meet (``chatlearn_hosting.rendezvous.meet``); None for one
    rank."""
    rendezvous_secret: str | None = field(default=None, repr=False)
    """Secret that ranks present at the rendezvous; None if the rendezvous is on loopback."""
    engine_arguments: dict[str, Any] = field(default_factory=dict)
    """Engine-native arguments, passed to the engine unchanged after the backend checked them."""
    handles: Mapping[str, RoleHandle] = field(default_factory=dict)
    """For a reward: the roles that it calls, by the handles of its record (``RewardSpec.uses``). For an environment:
    its generators, with their models and tokenizers; it samples with ``RolloutContext.generate``."""
    load_tokenizer: Callable[[], Any] | None = field(default=None, repr=False, compare=False)
    """For a reward: returns the tokenizer of the run's model (``data.Tokenizer``), which made the completions' text."""


@runtime_checkable
class Lifecycle(Protocol):
    """The life of a backend object: ``setup``, work, ``close``."""

    def setup(self) -> None:
        """Load the model or start the engine. Called once, in the process that hosts the backend.

        Called: before all other calls; in the process that hosts the backend; once.

        Raises:
            ModelError: the model directory cannot be used.
            BackendError: the engine does not start; quotes the engine's own message.
        """

    def health(self) -> str | None:
        """None while the backend can work, otherwise what is wrong, without a final full stop.

        A runtime calls this when a call failed or did not return, and quotes the result in its error. It may be called
        from any thread, while another call runs or hangs, and must return at once.

        Called: when a call failed or did not return; in any thread of the process that hosts the backend; once per
        failure.
        """

    def offload(self, parts: Collection[MemoryPart]) -> None:
        """Move these parts out of device memory. Parts that this backend does not hold, or that are already offloaded,
        are ignored. When it returns, the memory is free for other processes. A trainer's calls that need an offloaded
        part raise a ``BackendError`` that names it.

        Called: before another role gets the devices that they share; in the process that hosts the backend; once or
        more per step of a run with shared devices.
        """

    def onload(self, parts: Collection[MemoryPart]) -> None:
        """Move offloaded parts back to the device. Values are unchanged, except for a KV cache, which comes back
        empty.

        Called: before a call that needs the parts; in the process that hosts the backend; as often as ``offload``,
        which may have named other parts.
        """

    def close(self) -> None:
        """Release everything: processes, shared memory, ports, files. Safe to call twice.

        Called: last, also after a failed ``setup``; in the process that hosts the backend; once or twice.
        """


Factory = Callable[..., Any]
"""``factory(options, context) -> backend object``"""
