"""The actor: a process that becomes what its spec says.

Imports nothing beyond the standard library, so that environment variables are set before torch is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from chatlearn_ray.gpus import VISIBLE, NodeGpus, node_here
from chatlearn_ray.guard import STOPPED, children_of, state_of
from chatlearn_ray.user_code import UserCode, enter_directory


class WorkerHost:
    """One process of a role. Every call comes through ``invoke``, on the event loop; blocking work has a thread.

    Args:
        environment: variables of this process.
        path: where the driver finds modules.
        directory: the driver's.
        code: the Python files there, for machines that do not have them.
        gpus: those that it is to see; None where Ray has seen to that.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        path: Sequence[str],
        directory: str,
        code: UserCode | None,
        gpus: NodeGpus | None = None,
    ) -> None:
        os.environ.update(environment)
        if gpus is not None:
            os.environ[VISIBLE] = ",".join(gpus.ids)
        self._gpus = gpus
        sys.path.extend(entry for entry in path if entry not in sys.path)
        self._problem = enter_directory(directory, code)
        # Child processes (reward pools, engines) import what this one does.
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*sys.path, *_python_path()]))
        self._worker: Any = None

    async def start(self, spec: Any) -> Any:
        """Build the worker; returns an ``Answer`` with nothing, or a ``Failure``."""
        from chatlearn_core.exceptions import BackendError, ConfigError
        from chatlearn_ray.answer import Answer, Failure
        from chatlearn_ray.workers import build_worker

        try:
            if self._problem is not None:
                raise ConfigError(self._problem)
            if self._gpus is not None and self._gpus.node != node_here():
                raise BackendError("its slot moved to another node, with other GPUs, while it started")
            self._worker = build_worker(spec)
        except (Exception, SystemExit) as error:
            return Failure.of(error)
        return Answer(None)

    async def invoke(self, method: str, *args: Any) -> Any:
        """Call a coroutine method of the worker; returns ``Answer`` or ``Failure``, and raises nothing."""
        from chatlearn_ray.answer import Answer, Failure

        try:
            return Answer(await getattr(self._worker, method)(*args))
        except (Exception, SystemExit) as error:
            return Failure.of(error)

    async def invoke_with_block(self, method: str, *args: Any) -> tuple[Any, Any]:
        """The same for a method that returns (facts, arrays), as two results: the caller may leave the second."""
        from chatlearn_ray.answer import Answer

        answer = await self.invoke(method, *args)
        if not isinstance(answer, Answer):
            return answer, None
        facts, arrays = answer.value
        return Answer(facts), arrays

    async def is_there(self) -> list[int]:
        """Answers while the process lives and its interpreter turns: which processes of an engine below are stopped.

        What a user's reward does with its own processes is its affair.
        """
        is_reward = self._worker is None or self._worker.spec.kind == "reward"
        return [] if is_reward else stopped_below(os.getpid())

    async def stacks(self) -> str:
        """Where every thread of this process is now."""
        from chatlearn_ray.stacks import all_stacks

        return all_stacks()


def stopped_below(pid: int) -> list[int]:
    """Processes that one has started, or one of those, and that are stopped (SIGSTOP)."""
    stopped: list[int] = []
    for child in children_of(pid):
        if state_of(child) == STOPPED:
            stopped.append(child)
        stopped += stopped_below(child)
    return stopped


def _python_path() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
