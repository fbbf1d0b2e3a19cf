"""The common base of workers: plugins, an executor for blocking calls, one end of each weight transport."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from chatlearn_core.exceptions import BackendTimeoutError
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.protocols import Lifecycle
from chatlearn_core.runtime.boundary import Origin
from chatlearn_core.runtime.health import problem_of
from chatlearn_core.runtime.serial_executor import SerialExecutor
from chatlearn_core.types import Endpoint
from chatlearn_runtime_kit.devices import resolve_device
from chatlearn_workers.worker_spec import PluginChoice, WorkerSpec

NodeAddress = Callable[[], str]
GRACE_S = 5.0
"""Extra time of an outer timeout, seconds, so that the error comes from closest to the hang."""
_STOP_S = 10.0
"""Time for a running call to return when the worker is closed, seconds."""


@dataclass(slots=True, frozen=True)
class WorkerFacts:
    """Where a worker runs, and its part of the work."""

    pid: int
    host: str
    device: str
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    gpus: tuple[str, ...] = ()
    """GPUs of its node that it sees, by number or UUID; workers may share them."""


class Worker:
    """Base class of workers: plugins, an executor for blocking calls, one end of each weight transport.

    Args:
        node_address: returns the address under which other nodes reach this one.
    """

    def __init__(self, spec: WorkerSpec, node_address: NodeAddress) -> None:
        spec.check_versions()
        self.spec = spec
        self.node_address = node_address
        self.context = spec.context
        self.registry = discover_plugins()
        self.executor = SerialExecutor(self.context.role, spec.timeout_s)
        if spec.kind in ("trainer", "generator"):
            device = resolve_device(self.context.device, f"roles.{self.context.role}.device")
            self.context = replace(self.context, device=device)

    def build(self, plugin: PluginChoice, **more: Any) -> Any:
        """The backend object of a plugin choice; ``more`` is added to its context."""
        record, options = plugin.find(self.registry, self.spec.driver_host)
        return self.registry.load_factory(record)(options, replace(self.context, **more))

    @property
    def origin(self) -> Origin:
        """The beginning of messages about this backend's return values."""
        assert self.spec.plugin is not None
        vocab_size = self.context.model.vocab_size if self.context.model is not None else None
        return Origin(self.context.role, f"{self.spec.kind} {self.spec.plugin.name!r}", vocab_size)

    def endpoint(self) -> Endpoint:
        """This process as one end of a transport."""
        context = self.context
        return Endpoint(context.role, context.replica, context.rank, socket.gethostname(), context.device, os.getpid())

    def facts(self) -> WorkerFacts:
        """Who this is."""
        gpus = visible_gpus() if self.context.device.startswith("cuda") else ()
        return WorkerFacts(os.getpid(), socket.gethostname(), self.context.device, gpus=gpus)

    async def set_up(self, backend: Lifecycle) -> None:
        """Run a backend's setup in the executor, with the worker's number of threads. From then on its health is
        queried when a call fails or does not return.
        """
        if self.spec.num_threads is not None:
            torch.set_num_threads(self.spec.num_threads)
            await self.executor.run("set_num_threads", torch.set_num_threads, self.spec.num_threads)
        await self.executor.run("setup", backend.setup)
        self.executor.health = partial(problem_of, backend)

    async def close_all(self, closers: Sequence[Callable[[], None]]) -> None:
        """Stop the executor, then close; the first error is raised after all were tried."""
        errors: list[Exception] = []
        stopped = await asyncio.to_thread(self.executor.stop, _STOP_S)
        if not stopped:
            errors.append(
                BackendTimeoutError(f"a call still runs after {_STOP_S:g} s. It hangs here:\n{self.executor.stack()}")
            )
        for close in closers if stopped else ():
            try:
                close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


def visible_gpus() -> tuple[str, ...]:
    """GPUs that ``CUDA_VISIBLE_DEVICES`` leaves to this process, by number or UUID; empty if it is not set."""
    return tuple(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
