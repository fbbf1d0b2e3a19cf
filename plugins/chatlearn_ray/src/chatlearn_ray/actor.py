"""Workers as Ray actors, and Ray's object store: the runtime-specific part of ``chatlearn_workers``."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, ObjectLostError, RayActorError, RayError

from chatlearn_ray.gpus import VISIBLE, NodeGpus, node_here
from chatlearn_workers.host import WorkerHost
from chatlearn_workers.rpc import (
    AnswerLostError,
    CallError,
    ProcessEndedError,
    StoredValueLostError,
    UnreachableError,
)
from chatlearn_workers.user_code import UserCode

CONTROL = "control"
"""Concurrency group with its own thread, which answers while the actor's event loop is blocked."""
_SHOWN_LINES = 3
"""Number of lines of a Ray error that are quoted in ChatLearn's errors."""


class ActorHost(WorkerHost):
    """The class of the actors.

    Args:
        environment, path, directory, code: see ``WorkerHost``.
        gpus: GPUs that the actor may see; None if Ray restricts them.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        path: Sequence[str],
        directory: str,
        code: UserCode | None,
        gpus: NodeGpus | None = None,
    ) -> None:
        self._gpus = gpus
        visible = {} if gpus is None else {VISIBLE: ",".join(gpus.ids)}
        super().__init__({**environment, **visible}, path, directory, code)

    def check(self) -> None:
        """See ``WorkerHost``. Also raises BackendError if Ray has moved the actor to another node's GPUs."""
        from chatlearn_core.exceptions import BackendError

        super().check()
        if self._gpus is not None and self._gpus.node != node_here():
            raise BackendError("its slot moved to another node, with other GPUs, while it started")

    def node_address(self) -> str:
        """See ``WorkerHost``."""
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray has no types here
        return address


class ActorHandle:
    """Implements ``WorkerHandle``."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def call(self, method: str, *arguments: Any) -> Awaitable[Any]:
        return _answer(getattr(self.actor, method).remote(*arguments))

    def call_stored(self, method: str, *arguments: Any) -> tuple[Awaitable[Any], Any]:
        answer, stored = getattr(self.actor, method).options(num_returns=2).remote(*arguments)
        return _answer(answer), stored

    def ask(self, method: str) -> Awaitable[Any]:
        return _answer(getattr(self.actor, method).options(concurrency_group=CONTROL).remote())

    def kill(self) -> None:
        ray.kill(self.actor, no_restart=True)


class RayStore:
    """Implements ``ObjectStore`` with the object store of the cluster that this process has joined."""

    def put(self, value: Any) -> Any:
        return ray.put(value)

    def get(self, references: Sequence[Any], timeout_s: float) -> list[Any]:
        try:
            found: list[Any] = ray.get(list(references), timeout=timeout_s)
        except GetTimeoutError as error:
            raise TimeoutError(str(error)) from None
        except RayError as error:
            raise StoredValueLostError(_described(error)) from error
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return RayStore, ()


async def _answer(reference: Any) -> Any:
    try:
        return await reference
    except ActorUnavailableError as error:
        raise UnreachableError(_first_lines(error)) from error
    except RayActorError as error:
        raise ProcessEndedError(_first_lines(error)) from error
    except ObjectLostError as error:
        raise AnswerLostError(_first_lines(error)) from error
    except RayError as error:
        raise CallError(_described(error)) from error


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {_first_lines(error)}"


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:_SHOWN_LINES])
