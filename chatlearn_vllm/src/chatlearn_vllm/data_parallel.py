"""One engine with several data-parallel ranks, each in its own process.

Every rank receives the same commands in the same order and steps together with the others (``engine_side.lockstep``
explains why). Only requests differ: each goes to one rank. The remaining ranks would wait forever for a rank that died,
so the death of one rank ends all of them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Any

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, HostedCallError, HostedProcessLostError
from chatlearn_hosting.reserved_port import reserved_row
from chatlearn_vllm.engine_side.driver import Event
from chatlearn_vllm.hosts import ChildHost, OnEvent
from chatlearn_vllm.joint_call import JointCall
from chatlearn_vllm.routing import Routing

MEETING_PORTS = 2
"""Number of consecutive ports at which ranks rendezvous: the first for the engines, the second for their workers."""
_GRACE_S = 10.0
"""Time the other ranks have to answer a call that failed on one rank. After it, they count as waiting for that rank."""
_FAILURE_REPORT_WAIT_S = 2.0
"""Time to wait for a more precise reason after an engine died: ranks that lose a peer may report before the peer does.
"""
_CALLS_THAT_MAY_DIFFER = frozenset({"group", "live_bytes"})
"""Calls that leave the ranks in step even if they fail on some ranks only."""


class DataParallelHost:
    """See ``EngineHost``."""

    def __init__(
        self,
        name: str,
        start_timeout_s: float,
        *,
        num_ranks: int,
        python: str | None,
        environment: Mapping[str, str | None],
    ) -> None:
        """Store the settings; ``start`` starts the processes.

        Args:
            name: replica name for messages; messages about one rank append its number.
            start_timeout_s: longest time in seconds that the processes, and then the engines, may take to start.
            num_ranks: ``data_parallel_size``, 2 or more.
            python: interpreter of the ranks; None uses this one.
            environment: variables to set in every rank; None unsets one. All ranks see the same devices, and vLLM
                assigns each rank its own.
        """
        self._name = name
        self._start_timeout_s = start_timeout_s
        self._num_ranks = num_ranks
        self._python = python
        self._environment = environment
        self._ranks: list[ChildHost] = []
        self._routing = Routing(num_ranks)
        self._workers_per_rank = 1
        self._lock = threading.Lock()
        """Held while a command is sent to all ranks, and while the ranks are shut down."""
        self._ended: str | None = None
        """Why the ranks can no longer be called; None while they can."""
        self._failure_reports: dict[int, str] = {}
        self._on_event: OnEvent | None = None

    @property
    def shares_memory(self) -> bool:
        """See ``EngineHost``."""
        return False

    @property
    def lost(self) -> str | None:
        """See ``EngineHost``."""
        if self._ended is not None:
            return f"the engine died: {self._ended}"
        lost = ((number, rank.lost) for number, rank in enumerate(self._ranks))
        return next((f"data-parallel rank {number}: {reason}" for number, reason in lost if reason is not None), None)

    @property
    def ranks(self) -> Sequence[ChildHost]:
        """The ranks in order; empty before ``start``."""
        return self._ranks

    def start(self, arguments: Mapping[str, Any], *, log_level: str, num_threads: int | None) -> dict[str, Any]:
        """See ``EngineHost``; ``num_workers`` counts the workers of all ranks."""
        with reserved_row(MEETING_PORTS) as port:
            self._ranks = [self._rank(rank, port) for rank in range(self._num_ranks)]
            with ThreadPoolExecutor(self._num_ranks) as threads:
                list(threads.map(lambda rank: rank.process.start(self._start_timeout_s), self._ranks))
            facts: dict[str, Any] = self.call_blocking(
                "start", dict(arguments), log_level, num_threads, timeout_s=self._start_timeout_s
            )
        self._workers_per_rank = facts["num_workers"]
        return facts | {"num_workers": self._workers_per_rank * self._num_ranks}

    def listen(self, on_event: OnEvent) -> None:
        """See ``EngineHost``."""
        self._on_event = on_event
        for number, rank in enumerate(self._ranks):
            rank.listen(partial(self._on_rank_event, number))

    def submit(self, requests: Sequence[Mapping[str, Any]]) -> None:
        """See ``EngineHost``."""
        self._call_all("submit", [(share,) for share in self._routing.spread(requests)])

    def drop(self, keys: Sequence[int]) -> None:
        """See ``EngineHost``."""
        self._routing.ended(keys)
        self._call_all("drop", [(keys,)] * self._num_ranks)

    async def call(self, method: str, *arguments: Any) -> Any:
        """See ``EngineHost``. Returns the sum over ranks for ``live_bytes``, otherwise the first rank's result."""
        if method == "abort":
            self._routing.ended(arguments[0])
        joint_call = self._call_all(method, self._shares(method, arguments))
        return _merged(method, await asyncio.wrap_future(joint_call.future))

    def call_blocking(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """See ``EngineHost`` and ``call``."""
        joint_call = self._call_all(method, self._shares(method, arguments))
        try:
            return _merged(method, joint_call.future.result(timeout_s))
        except FutureTimeoutError:
            if joint_call.future.done():
                raise
        missing = joint_call.missing
        raise BackendTimeoutError(
            f"{self._name}: of {self._num_ranks} data-parallel ranks {missing} did not answer. The first of them:\n"
            f"{self._ranks[missing[0]].process.timeout_error(method, timeout_s)}"
        )

    def close(self) -> None:
        """See ``EngineHost``."""
        with self._lock:
            self._ended = self._ended or "it was closed"
        if self._ranks:
            with ThreadPoolExecutor(self._num_ranks) as threads:
                list(threads.map(ChildHost.close, self._ranks))

    def _rank(self, rank: int, port: int) -> ChildHost:
        meeting = {
            "VLLM_DP_RANK": rank,
            "VLLM_DP_RANK_LOCAL": rank,
            "VLLM_DP_SIZE": self._num_ranks,
            "VLLM_DP_MASTER_IP": "127.0.0.1",
            "VLLM_DP_MASTER_PORT": port,
        }
        return ChildHost(
            f"{self._name}, data-parallel rank {rank}",
            self._start_timeout_s,
            python=self._python,
            environment={**self._environment, **{name: str(value) for name, value in meeting.items()}},
            in_lockstep=True,
        )

    # Calls

    def _shares(self, method: str, arguments: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Return the arguments for each rank. They differ only when the rank's workers join a process group."""
        if method != "group" or arguments[0]["action"] != "join":
            return [arguments] * self._num_ranks
        request = arguments[0]
        first = request["first_rank"]
        return [({**request, "first_rank": first + rank * self._workers_per_rank},) for rank in range(self._num_ranks)]

    def _call_all(self, method: str, shares: Sequence[tuple[Any, ...]]) -> JointCall:
        """Call all ranks. Concurrent calls reach every rank in the same order."""
        joint_call = JointCall(method, self._num_ranks)
        with self._lock:
            answers = [_begin(rank, method, share) for rank, share in zip(self._ranks, shares, strict=True)]
        for number, answer in enumerate(answers):
            answer.add_done_callback(partial(self._record_answer, joint_call, number))
        return joint_call

    def _record_answer(self, joint_call: JointCall, rank: int, answer: Future[Any]) -> None:
        """Record that one rank has answered or failed; runs in any thread."""
        error = answer.exception()
        if error is None:
            joint_call.results[rank] = answer.result()
        elif self._ended is not None:
            error = HostedProcessLostError(f"{self._name}: {joint_call.method} failed: {self._ended}")
        elif isinstance(error, HostedCallError) and error.type_name == "StartError":
            error.text = f"data-parallel rank {rank}: {error.text}"
        is_last, failure = joint_call.take(rank, error, explains_most=_is_lost(error) and self._ended is None)
        if failure is None:
            if is_last:
                joint_call.future.set_result(joint_call.results)
            return
        if _is_lost(failure) or (is_last and joint_call.results and joint_call.method not in _CALLS_THAT_MAY_DIFFER):
            self._end(str(failure))
        elif not is_last:
            joint_call.limit_wait(_GRACE_S, partial(self._end, str(failure)))
        if is_last:
            joint_call.future.set_exception(failure)

    # Deaths

    def _on_rank_event(self, rank: int, event: Event) -> None:
        """Handle an event of one rank; runs on the event loop."""
        kind, first, second = event
        assert self._on_event is not None
        if kind == "tokens":
            self._routing.ended(key for key, _, _, reason, *_ in second if reason is not None)
        elif kind == "refused":
            self._routing.ended([first])
        else:
            self._rank_died(rank, first)
            return
        self._on_event(event)

    def _rank_died(self, rank: int, reason: str) -> None:
        if self._ended is None and self._ranks[rank].process.lost is None:
            # Its engine failed, perhaps because another rank died; that rank's report may follow.
            if not self._failure_reports:
                asyncio.get_running_loop().call_later(_FAILURE_REPORT_WAIT_S, self._end_by_failure_reports)
            self._failure_reports[rank] = reason
            return
        self._end(reason)
        self._report()

    def _end_by_failure_reports(self) -> None:
        reports = (f"data-parallel rank {rank}: {reason}" for rank, reason in sorted(self._failure_reports.items()))
        self._end("\n".join(reports))
        self._report()

    def _report(self) -> None:
        on_event, self._on_event = self._on_event, _ignore
        assert on_event is not None
        on_event(("dead", self._ended, None))

    def _end(self, reason: str) -> None:
        """Shut down all ranks without waiting. Keeps the first reason."""
        with self._lock:
            if self._ended is not None:
                return
            self._ended = reason
        for rank in self._ranks:
            threading.Thread(target=rank.process.close, args=[0.0], name=f"{self._name} end", daemon=True).start()


def _begin(rank: ChildHost, method: str, arguments: tuple[Any, ...]) -> Future[Any]:
    try:
        return rank.process.begin("do", method, *arguments)
    except BackendError as error:
        lost: Future[Any] = Future()
        lost.set_exception(error)
        return lost


def _is_lost(error: BaseException | None) -> bool:
    return isinstance(error, HostedProcessLostError)


def _merged(method: str, results: dict[int, Any]) -> Any:
    return sum(results.values()) if method == "live_bytes" else results[0]


def _ignore(_: Event) -> None:
    """Discard events: nothing follows the event that reports the engine's death."""
