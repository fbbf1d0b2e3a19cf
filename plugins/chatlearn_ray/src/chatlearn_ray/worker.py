"""What workers of all kinds share: plugins, a lane for blocking calls, one end of each weight transport."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from chatlearn_core.exceptions import BackendTimeoutError
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.runtime.boundary import Origin
from chatlearn_core.runtime.lane import Lane
from chatlearn_core.runtime.local import resolve_device
from chatlearn_core.types import Endpoint
from chatlearn_ray.gpus import assigned_gpus
from chatlearn_ray.worker_spec import PluginChoice, WorkerSpec

GRACE_S = 5.0
"""An outer wait lasts this much longer than the inner one, so that the error comes from nearest the hang."""
_STOP_S = 10.0
"""A call that still runs when the worker is closed may take this long to return."""


@dataclass(slots=True, frozen=True)
class WorkerFacts:
    """Where a worker runs and which part of the work it takes."""

    pid: int
    host: str
    device: str
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    gpus: tuple[str, ...] = ()
    """Those of its node that it sees, by number or UUID; several workers may have the same."""


class Worker:
    """What all kinds share: plugins, a lane for blocking calls, one end of each weight transport."""

    def __init__(self, spec: WorkerSpec) -> None:
        spec.check_versions()
        self.spec = spec
        self.context = spec.context
        self.registry = discover_plugins()
        self.lane = Lane(self.context.role, spec.timeout_s)
        if spec.kind != "reward":
            device = resolve_device(self.context.device, f"roles.{self.context.role}.device")
            self.context = replace(self.context, device=device)

    def build(self, plugin: PluginChoice) -> Any:
        """The backend object that a choice names."""
        record, options = plugin.find(self.registry, self.spec.driver_host)
        return self.registry.load_factory(record)(options, self.context)

    @property
    def origin(self) -> Origin:
        """What messages about something that this worker's backend returned begin with."""
        assert self.spec.plugin is not None
        vocab_size = self.context.model.vocab_size if self.context.model is not None else None
        return Origin(self.context.role, f"{self.spec.kind} {self.spec.plugin.name!r}", vocab_size)

    def endpoint(self) -> Endpoint:
        """This process as one end of a transport."""
        context = self.context
        return Endpoint(context.role, context.replica, context.rank, socket.gethostname(), context.device, os.getpid())

    def facts(self) -> WorkerFacts:
        """Who this is."""
        gpus = (self.spec.gpus or assigned_gpus()) if self.context.device.startswith("cuda") else ()
        return WorkerFacts(os.getpid(), socket.gethostname(), self.context.device, gpus=gpus)

    async def set_up(self, setup: Callable[[], None]) -> None:
        """Run a backend's setup in the lane, with the worker's number of threads."""
        if self.spec.num_threads is not None:
            torch.set_num_threads(self.spec.num_threads)
            await self.lane.run("set_num_threads", torch.set_num_threads, self.spec.num_threads)
        await self.lane.run("setup", setup)

    async def close_all(self, closers: Sequence[Callable[[], None]]) -> None:
        """Stop the lane, then close; the first error is raised when all were tried."""
        errors: list[Exception] = []
        stopped = await asyncio.to_thread(self.lane.stop, _STOP_S)
        if not stopped:
            errors.append(
                BackendTimeoutError(f"a call still runs after {_STOP_S:g} s. It hangs here:\n{self.lane.stack()}")
            )
        for close in closers if stopped else ():
            try:
                close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
