"""Every error that a user of ChatLearn can meet, in one small tree.

A message says what happened, where (file and key, sample id, plugin and version), which rule was broken, and what to
do about it. Code that catches, catches the narrowest class; nothing is swallowed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(slots=True, frozen=True)
class WorkerPlace:
    """Identifies the failed worker of a role, as far as it is known."""

    role: str
    worker: str = ""
    """``rank 1 of 2``, ``replica 0``, ``worker 3``; empty if the role is a single object in the driver's process."""
    method: str = ""
    """Name of the call that failed."""
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
    """Code used values of an array that stay with a worker: names sample and field, and how to fetch them.

    It is an ``AttributeError``, because a reference lacks attributes of a plain array.
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
    """A plugin was written for another plugin API, or its engine is missing or has the wrong version."""


class BackendError(ChatLearnError):
    """A trainer, generator, reward or transport failed while working: names role, rank, method and cause."""

    place: WorkerPlace | None = None
    """The failed worker, for programs and the failure page; the message names it, too."""
    process_is_gone = False
    """Whether the process was killed or hangs, rather than answering with an error: a retry in another process may
    succeed."""
    stack: str = ""
    """The worker's stack where it hangs, or its traceback if it ended with an error."""

    def at(self, place: WorkerPlace | None, stack: str = "") -> Self:
        """This error, with its place set."""
        self.place, self.stack = place, stack
        return self


class RoleLostError(BackendError):
    """A role cannot work in its present state; the cause is not the request or sample whose call raised it."""


class ReplicaLostError(RoleLostError):
    """A replica died and has no restarts left, so the run cannot continue."""


class TrainerLostError(RoleLostError):
    """A rank of a trainer died or hangs, so the others cannot continue; the runtime may rebuild the role."""


class RuntimeLostError(RoleLostError):
    """The basis of all roles' workers, such as the cluster, is gone, so nothing can be rebuilt."""


class BackendTimeoutError(BackendError):
    """A wait ended without an answer: names the waiting side, the missing side, the expected event and the time."""


class TurnLimitError(BackendError):
    """A rollout asked for one turn more than its limit allows: names the rollout, the limit and its setting."""


class ContractError(BackendError):
    """A plugin's return value breaks its contract: names role, plugin, sample and rule. The value is not used."""


class HostedProcessLostError(BackendError):
    """A process that hosts an engine is gone: names the process, how it ended and its last output."""


class HostedCallError(BackendError):
    """A method raised in a process that hosts an engine; the stack in that process is a note."""

    type_name: str = ""
    """Name of the exception's class in that process."""
    text: str = ""
    """The exception's message in that process."""


class WeightSyncError(BackendError):
    """Weights could not be moved: names the transport, the replica, and the tensors or ranks concerned."""


class Interrupted(ChatLearnError):  # noqa: N818  # a request to stop is not an error
    """The run was stopped on request (Ctrl-C or SIGTERM) and can be resumed."""
