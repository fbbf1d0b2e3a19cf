"""The runtime ``acme``: every worker is a process of this machine.

``chatlearn_workers`` has all that runtimes over processes share: groups of workers, timeouts, restarts, weight syncs. A
runtime over another framework replaces what is here: how a process starts, how it is called, where values lie.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.protocols import Device
from chatlearn_core.runtime.plan import RolePlan, RunPlan
from chatlearn_hosting.fork_server import ForkServer
from chatlearn_workers.runtime import WorkersRuntime

from acme_plugin.handle import ProcessHandle
from acme_plugin.options import AcmeOptions
from acme_plugin.store import FileStore

PRELOADED = ("acme_plugin.worker", "chatlearn_workers.workers", "torch.distributed")
"""Modules that the fork server imports once, so that no worker has to."""


class AcmeRuntime(WorkersRuntime):
    """Starts the workers of a run as processes of this machine.

    Raises:
        ConfigError: ``store_directory`` is no directory.
    """

    store: FileStore

    def __init__(self, options: AcmeOptions, plan: RunPlan) -> None:
        folder = options.store_directory
        if folder is not None and not Path(folder).is_dir():
            raise ConfigError(f"runtime.options.store_directory: {folder} is no directory; make it, or remove the key")
        name = f"chatlearn-acme-{uuid.uuid4().hex}"
        self._folder = Path(folder or tempfile.gettempdir(), name)
        super().__init__(options, plan, FileStore(self._folder))
        self._handles: list[ProcessHandle] = []
        self._server: ForkServer | None = None

    def fork_server(self) -> ForkServer:
        """Start what forks the workers."""
        return ForkServer(*PRELOADED)

    async def close(self) -> None:
        """Close all workers, and wait until their processes are gone."""
        try:
            await super().close()
        finally:
            await asyncio.gather(*(handle.ended for handle in self._handles))

    # What WorkersRuntime asks of a framework

    async def _open(self) -> None:
        self._folder.mkdir(mode=0o700)
        self._server = self.fork_server()

    async def _start_process(self, role: RolePlan, index: int) -> ProcessHandle:
        assert self._server is not None, "called after _open"
        no_code = None  # of the user's own files: every process finds them where the driver does
        handle = await ProcessHandle.start(self._server, (*self._host_arguments(), no_code), self.store)
        self._handles.append(handle)
        return handle

    def _leave(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._server is not None:
            self._server.close()
            self._server = None

    def _planned_devices(self, role: RolePlan, index: int) -> Sequence[Device]:
        return [Device("cpu", is_gpu=False)]

    def _place_text(self, role: RolePlan, index: int) -> str:
        return "a process of this machine"
