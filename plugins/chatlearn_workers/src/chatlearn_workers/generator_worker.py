"""One replica of a generator, in its own process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from chatlearn_core.exceptions import TrainerLostError
from chatlearn_core.plugins.records import WeightSyncSpec
from chatlearn_core.protocols import Generator, MemoryAction, MemoryEvent, MemoryPart, WeightReceiver
from chatlearn_core.runtime.boundary import check_completion
from chatlearn_core.runtime.health import problem_of
from chatlearn_core.types import (
    Completion,
    Endpoint,
    GenerateRequest,
    ReplicaState,
    SyncOffer,
    SyncReceipt,
    SyncRequest,
)
from chatlearn_core.types.array_ref import Array
from chatlearn_runtime_kit.offload import move
from chatlearn_runtime_kit.weight_ends import take_weights, unfit_tensors
from chatlearn_workers.blocks import BlockStore, has_references
from chatlearn_workers.completions import CompletionFacts, CompletionPacker
from chatlearn_workers.rpc_result import Failure
from chatlearn_workers.worker import NodeAddress, Worker, WorkerFacts
from chatlearn_workers.worker_spec import PluginChoice, WorkerSpec

PROGRESS_S = 0.5
"""Delay after the first streamed token of a report, seconds; tokens are reported together."""
POLL_S = 30.0
"""Maximum time between answers of ``collect``, seconds."""


@dataclass(slots=True, frozen=True)
class ReplicaReport:
    """A generator replica's report of its state, sent with every answer."""

    state: ReplicaState
    policy_version: int
    results: tuple[tuple[int, CompletionFacts | Failure], ...] = ()
    """(number, outcome) of requests that ended."""
    num_bytes: int = 0
    """Size of the completions' arrays, which are in a block."""
    problem: str | None = None
    """The replica's own problem, see ``Lifecycle.health``."""
    tokens: tuple[tuple[int, int, list[int]], ...] = ()
    """(number, position, token ids) sampled since the last report, for requests with streaming."""


class GeneratorWorker(Worker):
    """One replica of a generator. Requests arrive in batches and are answered as they end."""

    def __init__(self, spec: WorkerSpec, node_address: NodeAddress) -> None:
        super().__init__(spec, node_address)
        self._generator: Generator | None = None
        self._receivers: dict[str, WeightReceiver] = {}
        self._transports: dict[str, str] = {}
        """Name of each receiver's plugin, for messages."""
        self._running: set[asyncio.Task[None]] = set()
        self._ended: list[tuple[int, GenerateRequest, Completion | Failure]] = []
        self._news = asyncio.Event()
        self._tokens: dict[int, tuple[int, list[int]]] = {}
        """Number -> position and tokens not yet reported."""

    @property
    def generator(self) -> Generator:
        assert self._generator is not None, "setup comes first"
        return self._generator

    async def setup(self) -> WorkerFacts:
        """Start the engine."""
        assert self.spec.plugin is not None
        self._generator = self.build(self.spec.plugin)
        await self.set_up(self.generator)
        return self.facts()

    async def submit(
        self, requests: Sequence[tuple[int, GenerateRequest]], streamed: Collection[int] = frozenset()
    ) -> None:
        """Start numbered requests, in order and in one turn of the event loop, so that batches do not depend on timing.

        A request that refers to tokens lost with their node is answered with that error. Tokens of ``streamed``
        requests are included in the reports.
        """
        if any(has_references(request) for _, request in requests):
            requests = await asyncio.to_thread(self._fetched, requests)
            if self._ended:
                self._news.set()
        for number, request in requests:
            task = asyncio.create_task(self._generate(number, request, number in streamed))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def _fetched(self, requests: Sequence[tuple[int, GenerateRequest]]) -> list[tuple[int, GenerateRequest]]:
        """The requests with plain arrays, without those that refer to a lost array."""
        fetched: list[tuple[int, GenerateRequest]] = []
        store = BlockStore()
        for number, request in requests:
            try:
                fetched.append((number, store.get_request(request)))
            except TrainerLostError as error:
                self._ended.append((number, request, Failure.of(error)))
        return fetched

    def _note_tokens(self, number: int, start: int, token_ids: list[int]) -> None:
        if not self._tokens:
            asyncio.get_running_loop().call_later(PROGRESS_S, self._news.set)
        self._tokens.setdefault(number, (start, []))[1].extend(token_ids)

    async def _generate(self, number: int, request: GenerateRequest, is_streamed: bool) -> None:
        on_tokens = partial(self._note_tokens, number) if is_streamed else None
        outcome: Completion | Failure
        try:
            outcome = await self.generator.generate(request, on_tokens)
            check_completion(outcome, request, self.origin)  # here its values are at hand
        except Exception as error:
            outcome = Failure.of(error)
        self._ended.append((number, request, outcome))
        self._news.set()

    async def collect(self) -> tuple[ReplicaReport, dict[str, Array]]:
        """Requests that ended since the last call, and all their arrays; waits for at least one, up to a time limit."""
        try:
            async with asyncio.timeout(POLL_S):
                await self._news.wait()
        except TimeoutError:
            pass  # an empty report says that this worker is alive
        self._news.clear()
        ended, self._ended = self._ended, []
        tokens, self._tokens = self._tokens, {}
        packer = CompletionPacker()
        results = tuple(
            (number, outcome if isinstance(outcome, Failure) else packer.add(outcome, request.sampling))
            for number, request, outcome in ended
        )
        block = packer.block()
        num_bytes = sum(array.nbytes for array in block.values())
        streamed = tuple((number, start, token_ids) for number, (start, token_ids) in tokens.items())
        return replace(self._report(results, num_bytes), tokens=streamed), block

    async def status(self) -> ReplicaReport:
        return self._report()

    def _report(
        self, results: tuple[tuple[int, CompletionFacts | Failure], ...] = (), num_bytes: int = 0
    ) -> ReplicaReport:
        generator = self.generator
        return ReplicaReport(generator.state, generator.policy_version, results, num_bytes, problem_of(generator))

    async def abort(self, request_ids: Collection[str] | None) -> None:
        await self.generator.abort(request_ids)

    async def pause(self) -> None:
        await self.generator.pause()

    async def resume(self) -> None:
        await self.generator.resume()

    async def move(self, action: MemoryAction, parts: Collection[MemoryPart]) -> list[MemoryEvent]:
        """Offload or onload parts; returns the memory in use afterwards."""
        context = self.context
        return await self.executor.run(
            action, lambda: move(self.generator, action, parts, role=context.role, worker=context.replica)
        )

    async def open_transport(self, key: str, plugin: PluginChoice) -> Endpoint:
        """Build this replica's receiver, replacing an existing one."""
        record, options = plugin.find(self.registry, self.spec.driver_host)
        assert isinstance(record, WeightSyncSpec)
        if (former := self._receivers.pop(key, None)) is not None:
            former.close()
        self._receivers[key] = self.registry.load_factory(record, "receiver")(options, self.endpoint())
        self._transports[key] = f"weight sync {record.name!r} ({self.registry.origin(record)})"
        return self.endpoint()

    async def unfit(self, request: SyncRequest) -> list[str]:
        """See ``unfit_tensors``."""
        return unfit_tensors(self.generator.loader, request)

    async def begin(self, request: SyncRequest) -> None:
        """Check the manifest and stop serving."""
        await self.generator.loader.begin(request.policy_version, request.manifest)

    async def receive(self, key: str, request: SyncRequest, offers: Sequence[SyncOffer]) -> SyncReceipt:
        """See ``take_weights``."""
        receiver, replica = self._receivers[key], self.context.replica
        return await take_weights(receiver, self.generator.loader, request, offers, replica, self._transports[key])

    async def fail(self, reason: str) -> None:
        """Give the replica up."""
        await self.generator.loader.fail(reason)

    async def close(self) -> None:
        """Close receivers and engine."""
        generator, self._generator = self._generator, None
        receivers, self._receivers = self._receivers, {}
        closers: list[Callable[[], None]] = [receiver.close for receiver in receivers.values()]
        await self.close_all([*closers, *([generator.close] if generator else [])])
