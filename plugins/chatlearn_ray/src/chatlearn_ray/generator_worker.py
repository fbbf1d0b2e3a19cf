"""One replica of a generator, in its own process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from chatlearn_core.exceptions import TrainerLostError, WeightSyncError
from chatlearn_core.plugins.records import WeightSyncSpec
from chatlearn_core.protocols import Generator, MemoryAction, MemoryEvent, MemoryPart, PauseMode, WeightReceiver
from chatlearn_core.runtime.boundary import check_completion
from chatlearn_core.runtime.moving import move
from chatlearn_core.runtime.sync_answers import checked_num_bytes
from chatlearn_core.types import (
    Completion,
    Endpoint,
    GenerateRequest,
    ReplicaState,
    SyncOffer,
    SyncPlan,
    SyncReceipt,
)
from chatlearn_core.types.stored import Array
from chatlearn_ray.answer import Failure
from chatlearn_ray.blocks import fetched_request
from chatlearn_ray.completions import CompletionFacts, CompletionPacker
from chatlearn_ray.worker import GRACE_S, Worker, WorkerFacts
from chatlearn_ray.worker_spec import PluginChoice, WorkerSpec

POLL_S = 30.0
"""``collect`` answers at least this often."""


@dataclass(slots=True, frozen=True)
class ReplicaReport:
    """What a generator replica says of itself with every answer."""

    state: ReplicaState
    policy_version: int
    results: tuple[tuple[int, CompletionFacts | Failure], ...] = ()
    """(number, outcome) of requests that ended."""
    num_bytes: int = 0
    """Of the completions' arrays, which are in a block."""


class GeneratorWorker(Worker):
    """One replica of a generator. Requests come many at a time and are answered as they end."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._generator: Generator | None = None
        self._receivers: dict[str, WeightReceiver] = {}
        self._transports: dict[str, str] = {}
        """Names the plugin of each receiver, for messages."""
        self._running: set[asyncio.Task[None]] = set()
        self._ended: list[tuple[int, GenerateRequest, Completion | Failure]] = []
        self._news = asyncio.Event()

    @property
    def generator(self) -> Generator:
        assert self._generator is not None, "setup comes first"
        return self._generator

    async def setup(self) -> WorkerFacts:
        """Start the engine."""
        assert self.spec.plugin is not None
        self._generator = self.build(self.spec.plugin)
        await self.set_up(self.generator.setup)
        return self.facts()

    async def submit(self, requests: Sequence[tuple[int, GenerateRequest]]) -> None:
        """Start numbered requests, in order and in one turn of the event loop, so that a batch does not depend on
        timing. One that resumes from tokens which are lost with their node is answered with that.
        """
        if any(request.resume_from is not None for _, request in requests):
            requests = await asyncio.to_thread(self._fetched, requests)
            if self._ended:
                self._news.set()
        for number, request in requests:
            task = asyncio.create_task(self._generate(number, request))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def _fetched(self, requests: Sequence[tuple[int, GenerateRequest]]) -> list[tuple[int, GenerateRequest]]:
        """The requests with what they resume from, without those for which it is gone."""
        fetched: list[tuple[int, GenerateRequest]] = []
        for number, request in requests:
            try:
                fetched.append((number, fetched_request(request)))
            except TrainerLostError as error:
                self._ended.append((number, request, Failure.of(error)))
        return fetched

    async def _generate(self, number: int, request: GenerateRequest) -> None:
        outcome: Completion | Failure
        try:
            outcome = await self.generator.generate(request)
            check_completion(outcome, request, self.origin)  # here its values are at hand
        except Exception as error:
            outcome = Failure.of(error)
        self._ended.append((number, request, outcome))
        self._news.set()

    async def collect(self) -> tuple[ReplicaReport, dict[str, Array]]:
        """Requests that ended since the last call, and the arrays of all of them; waits for one, but not for ever."""
        try:
            async with asyncio.timeout(POLL_S):
                await self._news.wait()
        except TimeoutError:
            pass  # an empty report says that this worker is alive
        self._news.clear()
        ended, self._ended = self._ended, []
        packer = CompletionPacker()
        results = tuple(
            (number, outcome if isinstance(outcome, Failure) else packer.add(outcome, request.sampling))
            for number, request, outcome in ended
        )
        block = packer.block()
        num_bytes = sum(array.nbytes for array in block.values())
        return ReplicaReport(self.generator.state, self.generator.policy_version, results, num_bytes), block

    async def status(self) -> ReplicaReport:
        return ReplicaReport(self.generator.state, self.generator.policy_version)

    async def abort(self, request_ids: Collection[str] | None) -> None:
        await self.generator.abort(request_ids)

    async def pause(self, mode: PauseMode) -> None:
        await self.generator.pause(mode)

    async def resume(self) -> None:
        await self.generator.resume()

    async def move(self, action: MemoryAction, parts: Collection[MemoryPart]) -> list[MemoryEvent]:
        """Offload or onload parts; what is live afterwards."""
        context = self.context
        return await self.lane.run(
            action, lambda: move(self.generator, action, parts, role=context.role, worker=context.replica)
        )

    async def open_transport(self, key: str, plugin: PluginChoice) -> Endpoint:
        """Build this replica's receiver."""
        record, options = plugin.find(self.registry, self.spec.driver_host)
        assert isinstance(record, WeightSyncSpec)
        self._receivers[key] = self.registry.load_factory(record, "receiver")(options, self.endpoint())
        self._transports[key] = f"weight sync {record.name!r} ({self.registry.origin(record)})"
        return self.endpoint()

    async def begin(self, plan: SyncPlan) -> None:
        """Check the manifest and stop serving."""
        await self.generator.loader.begin(plan.policy_version, plan.manifest)

    async def receive(self, key: str, plan: SyncPlan, offers: Sequence[SyncOffer]) -> SyncReceipt:
        """Take the weights and serve them; a failure is a receipt, and the replica is dead."""
        loader, start = self.generator.loader, time.perf_counter()
        try:
            async with asyncio.timeout(plan.timeout_s + GRACE_S):
                received = await self._receivers[key].receive(plan, offers, loader)
            num_bytes = checked_num_bytes(received, self._transports[key])
            version = await loader.finish()
            if version != plan.policy_version:
                raise WeightSyncError(f"it confirmed version {version} where {plan.policy_version} was sent")
        except (Exception, SystemExit) as error:
            reason = str(error) or f"no answer within {plan.timeout_s:g} s (weight_sync.timeout_s)"
            await loader.fail(reason)
            text = f"{type(error).__name__}: {reason}"
            return SyncReceipt(self.context.replica, plan.policy_version, "dead", error=text)
        seconds = time.perf_counter() - start
        weight_bytes = plan.manifest.num_bytes
        return SyncReceipt(self.context.replica, version, "serving", num_bytes, seconds, weight_bytes=weight_bytes)

    async def fail(self, reason: str) -> None:
        """Give the replica up."""
        await self.generator.loader.fail(reason)

    async def close(self) -> None:
        """Close receivers and engine."""
        generator, self._generator = self._generator, None
        receivers, self._receivers = self._receivers, {}
        closers: list[Callable[[], None]] = [receiver.close for receiver in receivers.values()]
        await self.close_all([*closers, *([generator.close] if generator else [])])
