"""A thread that drives one engine: it takes requests, steps while there is work, and runs commands between steps.

The adapter uses it in the same process, or through ``chatlearn_hosting`` from another process. All arguments and
results therefore consist of plain builtins, and every method that can block returns a future (a coroutine when hosted).
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from .engine import Engine, Report

Event = tuple[str, Any, Any]
"""``("tokens", policy version, reports)``: the result of one step. ``("refused", key, reason)``: the engine refused a
request. ``("dead", reason, None)``: the engine failed; this is the last event."""
Emit = Callable[[Event], None]

_JOIN_S = 5.0


class EngineDriver:
    """One engine and its thread. Any thread may call the methods; they take effect in call order."""

    def __init__(self, emit: Emit) -> None:
        """Start the thread; ``start`` creates the engine.

        Args:
            emit: receives events; the thread calls it at most once a step.
        """
        self._emit = emit
        self._work: deque[tuple[Callable[[], Any], Future[Any] | None]] = deque()
        """Functions to run between steps, with the future that awaits the result. Without a future, a failure ends the
        engine."""
        self._condition = threading.Condition()
        self._engine: Engine | None = None
        self._dead: str | None = None
        self._closing = False
        self._paused = False
        self._loading = False
        self._version = 0
        self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)
        self._thread.start()

    @property
    def dead(self) -> str | None:
        """Why the engine failed or was closed; None while it can be called."""
        return self._dead

    # What the adapter calls

    def start(self, arguments: Mapping[str, Any], log_level: str, num_threads: int | None) -> Future[Any]:
        """Start the engine. The future's result is ``Engine.facts``."""
        return self._do(lambda: self._start(arguments, log_level, num_threads))

    def submit(self, requests: Sequence[Mapping[str, Any]]) -> None:
        """Queue requests, in this order, for the next step.

        Does not wait. If the engine refuses a request, an event reports it.
        """
        self._enqueue(lambda: self._submit(requests))

    def drop(self, keys: Sequence[int]) -> None:
        """Abort requests without waiting. A failure to abort ends the engine."""
        self._enqueue(lambda: self._require().abort(keys))

    def abort(self, keys: Sequence[int]) -> Future[Any]:
        """Abort requests. Before the future completes, all tokens sampled so far have been reported; no later event
        names these requests.
        """
        return self._do(lambda: self._require().abort(keys))

    def pause(self) -> Future[Any]:
        """Stop stepping. When the future completes, no step is running."""
        return self._do(self._pause)

    def resume(self) -> Future[Any]:
        """Continue stepping."""
        return self._do(self._resume)

    def begin_update(self) -> Future[Any]:
        """Prepare the workers for new weights; requests wait."""
        return self._do(self._begin_update)

    def load(self, source: str, content: Any, copies: Mapping[str, list[str]]) -> Future[Any]:
        """Load one bucket in every worker; see ``weight_transfer.WeightUpdate``."""
        update = {"source": source, "content": content, "copies": copies}
        return self._do(lambda: self._require().call_workers("update_weights", update))

    def load_adapter(self, directory: str) -> Future[Any]:
        """Load a LoRA adapter from a directory. Call it between ``begin_adapter`` and ``finish_update``."""
        return self._do(lambda: self._require().load_adapter(directory))

    def begin_adapter(self) -> Future[Any]:
        """Begin an adapter update: requests wait, base weights stay."""
        return self._do(self._begin_adapter)

    def finish_update(self, policy_version: int, whole_model: bool) -> Future[Any]:
        """Check the new weights, discard caches computed with the old ones, and continue under the new version."""
        return self._do(lambda: self._finish_update(policy_version, whole_model))

    def group(self, request: Mapping[str, Any]) -> Future[Any]:
        """Join or leave a process group in every worker; see ``weight_transfer.GroupRequest``."""
        return self._do(lambda: self._require().call_workers("init_weight_transfer_engine", dict(request)))

    def sleep(self, level: int) -> Future[Any]:
        """Release memory; see ``Engine.sleep``."""
        return self._do(lambda: self._require().sleep(level))

    def wake(self, parts: list[str]) -> Future[Any]:
        """Restore memory; see ``Engine.wake``."""
        return self._do(lambda: self._require().wake(parts))

    def live_bytes(self, part: str) -> Future[Any]:
        """Measure the memory of a part; see ``Engine.live_bytes``."""
        return self._do(lambda: self._require().live_bytes(part))

    def close(self) -> None:
        """End the engine and the thread. Waits up to 5 s for a running step. A repeated call does nothing."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    # The thread

    def _do(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._condition:
            if self._dead is not None or self._closing:
                future.set_exception(RuntimeError(self._dead or "the engine was closed"))
                return future
            self._work.append((work, future))
            self._condition.notify()
        return future

    def _enqueue(self, work: Callable[[], Any]) -> None:
        with self._condition:
            if self._dead is None and not self._closing:
                self._work.append((work, None))
                self._condition.notify()

    @property
    def _can_step(self) -> bool:
        engine = self._engine
        return engine is not None and engine.has_work and not self._paused and not self._loading

    def _run(self) -> None:
        try:
            self._drive()
        except BaseException as error:
            trace = "".join(traceback.format_exception(error)[-3:])
            self._die(f"{type(error).__name__}: {error}\n{trace}")
        finally:
            self._die("the engine was closed")
            if self._engine is not None:
                self._engine.close()
                self._engine = None

    def _drive(self) -> None:
        """Run commands and steps until the driver is closed."""
        while True:
            with self._condition:
                while not (self._work or self._can_step or self._closing):
                    self._condition.wait()
                if self._closing:
                    return
                count = len(self._work)
            self._do_work(count)
            if self._can_step:
                self._step()

    def _do_work(self, count: int) -> None:
        """Run the next ``count`` queued functions."""
        for _ in range(count):
            with self._condition:
                do, future = self._work.popleft()
            self._settle(do, future)

    def _settle(self, do: Callable[[], Any], future: Future[Any] | None) -> None:
        if future is None:
            do()
            return
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = do()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    def _step(self) -> None:
        self._emit_tokens(self._require().step())

    def _emit_tokens(self, reports: list[Report]) -> None:
        if reports:
            self._emit(("tokens", self._version, reports))

    def _die(self, reason: str) -> None:
        """Fail all queued work, once."""
        with self._condition:
            if self._dead is not None:
                return
            self._dead = reason
            work = list(self._work)
            self._work.clear()
        for _, future in work:
            if future is not None and future.set_running_or_notify_cancel():
                future.set_exception(RuntimeError(reason))
        self._emit(("dead", reason, None))

    def _require(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the engine has not started")
        return self._engine

    def _start(self, arguments: Mapping[str, Any], log_level: str, num_threads: int | None) -> dict[str, Any]:
        self._engine = Engine(arguments, log_level=log_level, num_threads=num_threads)
        return self._engine.facts()

    def _submit(self, requests: Sequence[Mapping[str, Any]]) -> None:
        engine = self._require()
        for request in requests:
            try:
                engine.add(request)
            except ValueError as error:
                self._emit(("refused", request["key"], str(error)))
            except Exception as error:  # one bad request must not end the others
                self._emit(("refused", request["key"], f"{type(error).__name__}: {error}"))

    def _pause(self) -> None:
        self._paused = True
        self._finish_steps()

    def _resume(self) -> None:
        self._paused = False

    def _finish_steps(self) -> None:
        for reports in self._require().drain():
            self._emit_tokens(reports)

    def _begin_update(self) -> None:
        self._loading = True
        self._finish_steps()
        self._require().call_workers("start_weight_update")

    def _begin_adapter(self) -> None:
        self._loading = True
        self._finish_steps()

    def _finish_update(self, policy_version: int, whole_model: bool) -> None:
        engine = self._require()
        if whole_model:
            engine.call_workers("finish_weight_update")
        engine.reset_caches()
        self._version, self._loading = policy_version, False
