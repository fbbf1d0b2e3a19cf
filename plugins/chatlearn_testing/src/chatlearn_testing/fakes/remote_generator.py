"""A generator in another process, called over the child's standard streams.

The child runs any interpreter in which chatlearn-core is installed, so that an engine's pins need not agree with the
trainer's. Messages are pickles with their length in front; ``generator_server`` is the other end.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import Tensor

from chatlearn_core.exceptions import BackendError
from chatlearn_core.protocols import MemoryPart, RoleContext
from chatlearn_core.protocols.generator import OnTokens
from chatlearn_core.types import Completion, GenerateRequest, ReplicaState, WeightManifest, WeightShard
from chatlearn_testing.fakes.engine_arguments import refuse_engine_arguments
from chatlearn_testing.fakes.generator_server import read_message, write_message
from chatlearn_testing.fakes.options import FakeRemoteOptions

PATIENCE_S = 60.0
"""Timeout of blocking calls, seconds; coroutines have no timeout."""
SERVER = "from chatlearn_testing.fakes.generator_server import main; main()"


class RemoteFakeGenerator:
    """Implements ``Generator`` by calls to a ``FakeGenerator`` in a child process."""

    python = sys.executable
    """The child's interpreter."""

    def __init__(self, options: FakeRemoteOptions, context: RoleContext) -> None:
        refuse_engine_arguments(context)
        self.options = options
        self.context = context
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: dict[int, Future[Any]] = {}
        self._watchers: dict[int, tuple[asyncio.AbstractEventLoop, OnTokens]] = {}
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None
        self._state: ReplicaState = "loading"
        self._problem: str | None = "not set up"
        self._version = 0
        self._loader = _RemoteLoader(self)

    def setup(self) -> None:
        """Start the child and let it load the model."""
        self._process = subprocess.Popen(
            [self.options.python or self.python, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self._reader = threading.Thread(target=self._read, name="remote-generator", daemon=True)
        self._reader.start()
        self._wait(self._send("setup", self.options, self.context))

    def health(self) -> str | None:
        return self._problem

    def offload(self, parts: Collection[MemoryPart]) -> None:
        self._wait(self._send("offload", set(parts)))

    def onload(self, parts: Collection[MemoryPart]) -> None:
        self._wait(self._send("onload", set(parts)))

    def close(self) -> None:
        """Kill the child; open calls fail."""
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.wait()
            assert self._reader is not None
            self._reader.join()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
        self._state, self._problem = "dead", "the generator was closed"

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def state(self) -> ReplicaState:
        return self._state

    @property
    def loader(self) -> _RemoteLoader:
        return self._loader

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        try:
            completion: Completion = await self.ask("generate", request, on_tokens=on_tokens)
        except BackendError as error:
            if request.id in str(error):
                raise
            raise BackendError(f"request {request.id!r}: {error}") from error
        return completion

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        await self.ask("abort", None if request_ids is None else set(request_ids))

    async def pause(self) -> None:
        await self.ask("pause")

    async def resume(self) -> None:
        await self.ask("resume")

    async def ask(self, method: str, *arguments: Any, on_tokens: OnTokens | None = None) -> Any:
        """Call a method of the child's generator, or of its loader (``loader.begin``)."""
        watcher = (asyncio.get_running_loop(), on_tokens) if on_tokens is not None else None
        return await asyncio.wrap_future(self._send(method, *arguments, watcher=watcher))

    def _send(
        self, method: str, *arguments: Any, watcher: tuple[asyncio.AbstractEventLoop, OnTokens] | None = None
    ) -> Future[Any]:
        process = self._process
        if process is None or process.stdin is None:
            raise BackendError(f"generator role {self.context.role!r} (fake_remote) is closed or not set up: {method}")
        answer: Future[Any] = Future()
        with self._lock:
            number = next(self._ids)
            self._answers[number] = answer
            if watcher is not None:
                self._watchers[number] = watcher
            try:
                write_message(process.stdin, (number, method, arguments, watcher is not None))
            except (BrokenPipeError, ValueError) as error:
                del self._answers[number]
                raise BackendError(f"generator role {self.context.role!r}: its process is gone ({error})") from error
        return answer

    def _wait(self, answer: Future[Any]) -> Any:
        return answer.result(PATIENCE_S)

    def _read(self) -> None:
        """Deliver the child's answers until its stream ends."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        try:
            while True:
                number, kind, content, status = read_message(process.stdout)
                self._state, self._problem, self._version = status
                if kind == "tokens":
                    loop, on_tokens = self._watchers[number]
                    loop.call_soon_threadsafe(on_tokens, *content)
                    continue
                self._watchers.pop(number, None)
                answer = self._answers.pop(number)
                if answer.cancelled():
                    continue
                if kind == "result":
                    answer.set_result(content)
                else:
                    answer.set_exception(content)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):
            self._state, self._problem = "dead", "its process ended"
            for answer in list(self._answers.values()):
                if not answer.done():
                    answer.set_exception(BackendError(f"generator role {self.context.role!r}: its process ended"))


class _RemoteLoader:
    """Implements ``WeightLoader``: tensors are sent by value."""

    def __init__(self, generator: RemoteFakeGenerator) -> None:
        self._generator = generator

    def expected_manifest(self) -> WeightManifest:
        manifest: WeightManifest = self._generator._wait(self._generator._send("loader.expected_manifest"))
        return manifest

    async def begin(self, policy_version: int, manifest: WeightManifest) -> None:
        await self._generator.ask("loader.begin", policy_version, manifest)

    async def load_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        await self._generator.ask("loader.load_tensors", [(name, tensor.contiguous()) for name, tensor in tensors])

    async def load_boxes(self, shards: Iterable[WeightShard]) -> None:
        await self._generator.ask("loader.load_boxes", list(shards))

    async def load_checkpoint(self, directory: Path) -> None:
        await self._generator.ask("loader.load_checkpoint", directory)

    async def finish(self) -> int:
        version: int = await self._generator.ask("loader.finish")
        return version

    async def fail(self, reason: str) -> None:
        await self._generator.ask("loader.fail", reason)
