"""Every error that a user of ChatLearn can meet, in one small tree.

A message says what happened, where (file and key, sample id, plugin and version), which rule was broken, and what to
do about it. Code that catches, catches the narrowest class; nothing is swallowed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(slots=True, frozen=True)
class WorkerPlace:
    """Who failed: one worker of a role, as far as it is known."""

    role: str
    worker: str = ""
    """``rank 1 of 2``, ``replica 0``, ``worker 3``; empty where a role is one object in the driver's process."""
    method: str = ""
    """The call that did not do what it should."""
    process: int | None = None
    host: str = ""

    def __str__(self) -> str:
        inside = f" (process {self.process} on {self.host})" if self.process is not None else ""
        parts = [f"role {self.role!r}", *([self.worker] if self.worker else [])]
        return ", ".join(parts) + inside + (f", {self.method}" if self.method else "")


class ChatLearnError(Exception):
    """Base of every error raised on purpose by ChatLearn."""


class ConfigError(ChatLearnError):
    """The configuration is wrong: a file, a key, a value, or two settings that disagree."""


class DataError(ChatLearnError):
    """A dataset file or row cannot be used: names the file, the line and the rule."""


class FlowError(ChatLearnError):
    """A flow function cannot be traced into a graph: names the source line and the rule."""


class CheckpointError(ChatLearnError):
    """A checkpoint is missing, incomplete or belongs to another run."""


class UnfetchedError(ChatLearnError, AttributeError):
    """Values of an array were used that stay with a worker: names sample and field, and how to get them.

    An ``AttributeError``, since attributes of a plain array are missing from a reference.
    """


class ModelError(ChatLearnError):
    """A model directory cannot be used: no weights, no configuration, or a foreign tokenizer."""


class PluginError(ChatLearnError):
    """A plugin cannot be used."""


class PluginNotFoundError(PluginError):
    """No plugin of that kind is registered under the requested name."""


class PluginConflictError(PluginError):
    """Two distributions register the same kind and name."""


class PluginIncompatibleError(PluginError):
    """A plugin was built for another plugin API, or the engine it needs is missing or has another version."""


class BackendError(ChatLearnError):
    """A trainer, generator, reward or transport failed while working: names role, rank, method and cause."""

    place: WorkerPlace | None = None
    """Who failed, for programs and the failure page; the message says it too."""
    process_is_gone = False
    """Whether a process was killed, or hangs, rather than answered that it failed: another one may do better."""
    stack: str = ""
    """Where it hangs, or the traceback that it ended with, in the worker."""

    def at(self, place: WorkerPlace | None, stack: str = "") -> Self:
        """This error, with its place."""
        self.place, self.stack = place, stack
        return self


class RoleLostError(BackendError):
    """A role cannot work as it is: no failure of one request or sample, whoever's call met it."""


class ReplicaLostError(RoleLostError):
    """A replica died and may not be rebuilt any more: the run cannot go on."""


class TrainerLostError(RoleLostError):
    """A rank of a trainer died or hangs: the others cannot go on without it; the runtime may rebuild the role."""


class RuntimeLostError(RoleLostError):
    """What the workers of all roles stand on is gone, such as the cluster: nothing can be rebuilt on it."""


class BackendTimeoutError(BackendError):
    """A wait ended without an answer: names who waited, for whom, for what and how long."""


class ContractError(BackendError):
    """What a plugin returned is not what its contract says: names role, plugin, sample and rule. It is not used."""


class HostedProcessLostError(BackendError):
    """A process that hosts an engine is gone: names it, how it ended and what it printed last."""


class HostedCallError(BackendError):
    """What a method raised in a process that hosts an engine; its stack there is a note."""

    type_name: str = ""
    """Class of the exception there, by its name."""
    text: str = ""
    """Its message there."""


class WeightSyncError(BackendError):
    """Weights could not be moved: names the transport, the replica, and the tensors or ranks concerned."""


class Interrupted(ChatLearnError):  # noqa: N818  # a request, not an error of anybody
    """The run was stopped on request (Ctrl-C or SIGTERM) and can be resumed."""
