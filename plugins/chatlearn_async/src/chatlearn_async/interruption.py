"""Completions that weight syncs interrupt: requests that end or pause in the engine and go on under new weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from chatlearn_async.admissions import AdmissionLog, Replay
from chatlearn_async.busy_time import BusyTime
from chatlearn_async.options import DuringSync
from chatlearn_core.exceptions import BackendError, ConfigError, RoleLostError
from chatlearn_core.executor.rollouts.manager import Rollouts
from chatlearn_core.executor.rollouts.pending import Group, Progress
from chatlearn_core.executor.step_samples import RolloutRequest
from chatlearn_core.protocols import AtSync
from chatlearn_core.types import Completion, GenerateRequest

_RETRY_S = 1.0
"""After this time without an answer, requests are aborted once more: some may have started only then."""


class InterruptibleCompletions:
    """Answers the flow's calls on generators: a ``CompletionSource``.

    Between ``interrupt`` and ``resume`` no request of the roles is open, or all are paused in the engine; with
    ``continue``, fleets interrupt those of a replica when it loads weights. A request that was aborted is made again
    with the tokens so far; its random numbers depend on the token, so its tokens are those of the weights that serve
    each of them.

    Args:
        rollouts: the rollout managers, which send the requests.
        roles: generator roles whose weights change. Requests to others pass unchanged.
        how: what becomes of open requests; with ``wait``, ``interrupt`` is called when there are none.
        at_sync: how fleets interrupt the requests of a replica, with ``continue``.
        log: records interruptions by ``abort``.
        replay: interruptions to repeat.
        keeps_progress: whether a sample is one completion, so that its tokens are kept for checkpoints.
        turns_together: see ``CompletionSource``.
        clock: returns seconds.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        roles: Collection[str],
        how: DuringSync,
        *,
        at_sync: AtSync = "none",
        log: AdmissionLog | None = None,
        replay: Replay | None = None,
        keeps_progress: bool = True,
        turns_together: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rollouts = rollouts
        self.roles = frozenset(roles)
        self.how = how
        self.at_sync = at_sync
        self.log = log
        self.replay = replay
        self.keeps_progress = keeps_progress
        self.turns_together = turns_together
        self.busy = BusyTime(clock)
        self.step = 0
        """The step whose weight sync is next."""
        self._open = asyncio.Event()
        """Cleared between ``interrupt`` and ``resume``."""
        self._open.set()
        self._resumed = asyncio.Event()
        """Set, and replaced, by ``resume``."""
        self._num_interruptions = 0
        self._is_paused = False
        self._tasks: dict[str, tuple[str, asyncio.Task[Completion]]] = {}
        """Request id -> its role, and the call of the rollout manager."""
        self._parts: dict[str, Completion] = {}
        """Request id -> its tokens up to the last interruption."""
        self._ended: dict[str, Progress] = {}
        """Sample id -> its completion or failure, while its wave is unfinished."""

    async def completion(self, role: str, request: RolloutRequest) -> Completion:
        """See ``CompletionSource``."""
        asked = request.generate_request
        if role not in self.roles or asked is None:
            return await self.rollouts.completion(role, request)
        if (ended := self._ended.get(asked.id)) is not None:  # before the run resumed
            if ended.failure is not None:
                raise ended.failure
            assert ended.completion is not None, "what ended has a completion or a failure"
            return ended.completion
        try:
            completion = await self._uninterrupted(role, asked)
        except RoleLostError:
            raise
        except BackendError as error:
            self._note(asked.id, Progress(failure=error))
            raise
        self._note(asked.id, Progress(completion))
        return completion

    def _note(self, request_id: str, progress: Progress) -> None:
        self._parts.pop(request_id, None)
        if self.keeps_progress:
            self._ended[request_id] = progress

    async def _uninterrupted(self, role: str, asked: GenerateRequest) -> Completion:
        """The whole completion, however often it is interrupted."""
        while True:
            await self._open.wait()
            cut = None if self.replay is None else self.replay.cut(self.step, asked.id)
            if cut is not None:
                resumed = self._resumed
                await self._sample_to(cut, role, asked)
                await resumed.wait()
                continue
            number = self._num_interruptions
            completion = await self._call(role, replace(asked, resume_from=self._parts.get(asked.id)))
            was_interrupted = self.how == "continue" or number != self._num_interruptions
            if completion.finish_reason != "abort" or not was_interrupted:
                return completion
            if self.how == "continue":  # no interrupt fetches it
                [completion] = await self.rollouts.runtime.data.aget_completions([completion])
            self._keep(asked.id, completion)

    async def _sample_to(self, cut: int, role: str, asked: GenerateRequest) -> None:
        """Sample the tokens that a recorded completion had when it was interrupted.

        Raises:
            ConfigError: the completion ends before.
        """
        part = self._parts.get(asked.id)
        if cut <= (0 if part is None else len(part.token_ids)):
            return
        short = replace(asked, sampling=replace(asked.sampling, max_tokens=cut), resume_from=part)
        completion = await self._call(role, short)
        if completion.finish_reason != "length" or len(completion.token_ids) != cut:
            assert self.replay is not None, "cuts come from a record"
            raise ConfigError(
                f"{self.replay.path} (rollout.options.replay) has sample {asked.id!r} unfinished after {cut} tokens at "
                f"the weight sync of step {self.step}, but here it ended after {len(completion.token_ids)} "
                f"({completion.finish_reason}). It belongs to a run with other data, settings or software"
            )
        self._keep(asked.id, replace(completion, sampling=asked.sampling, finish_reason="abort"))

    def _keep(self, request_id: str, completion: Completion) -> None:
        if len(completion.token_ids):
            self._parts[request_id] = completion

    async def _call(self, role: str, request: GenerateRequest) -> Completion:
        task = asyncio.ensure_future(self.rollouts.of(role).generate(request))
        self._tasks[request.id] = role, task
        self.busy.begin()
        try:
            return await task  # a cancellation is passed to the task
        finally:
            self.busy.end()
            del self._tasks[request.id]

    # Weight syncs

    async def interrupt(self, in_flight: Collection[str]) -> None:
        """Let no request sample until ``resume``; with ``continue``, let fleets interrupt them.

        Args:
            in_flight: ids of the samples whose rollouts are unfinished, for the record.

        Raises:
            BackendError: a replica that lives could not be asked.
            ConfigError: the record that is repeated does not fit.
        """
        if self.how == "continue":
            for role in self.roles:
                self.rollouts.runtime.generator(role).at_sync = self.at_sync
            return
        self._open.clear()
        if self.how == "pause":
            await self._pause()
        else:
            await self._end_all(in_flight)
        await self._fetch_values()
        if self.log is not None:
            open_ids = (name for name in in_flight if name not in self._ended)
            self.log.write(self.step, {name: self._num_tokens(name) for name in open_ids})

    async def _end_all(self, in_flight: Collection[str]) -> None:
        self._num_interruptions += 1
        if self.replay is not None:
            self.replay.check(self.step, set(in_flight))
        while self._tasks:
            if self.replay is None:
                for role in self.roles:
                    if ids := [name for name, (of_role, _) in self._tasks.items() if of_role == role]:
                        await self.rollouts.runtime.generator(role).abort(ids)
            if running := [task for _, task in self._tasks.values()]:
                await asyncio.wait(running, timeout=_RETRY_S, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)  # those that wait for a task take its result

    async def _pause(self) -> None:
        if self._tasks and not self._is_paused:
            self._is_paused = True
            for role in sorted(self.roles):
                await self.rollouts.runtime.generator(role).pause()
            self.busy.pause()

    async def resume(self) -> None:
        """Go on after ``interrupt``: every replica serves the new weights."""
        if self._is_paused:
            self._is_paused = False
            for role in sorted(self.roles):
                await self.rollouts.runtime.generator(role).resume()
            self.busy.go_on()
        self._open.set()
        resumed, self._resumed = self._resumed, asyncio.Event()
        resumed.set()

    async def _fetch_values(self) -> None:
        """Replace references by values, so that they survive the loss of a worker and can be saved."""
        data = self.rollouts.runtime.data
        parts = await data.aget_completions(list(self._parts.values()))
        self._parts = dict(zip(self._parts, parts, strict=True))
        found = {name: one.completion for name, one in self._ended.items() if one.completion is not None}
        for name, completion in zip(found, await data.aget_completions(list(found.values())), strict=True):
            self._ended[name] = Progress(completion)

    def _num_tokens(self, sample_id: str) -> int:
        part = self._parts.get(sample_id)
        return 0 if part is None else len(part.token_ids)

    # Progress

    def progress(self, sample_id: str) -> Progress:
        """How far a sample was at the last interruption."""
        return self._ended.get(sample_id) or Progress(self._parts.get(sample_id) if self.keeps_progress else None)

    def restore(self, group: Group) -> None:
        """Take over the progress of a group from a checkpoint."""
        for request, progress in zip(group.requests, group.progress, strict=True):
            if progress.ended:
                self._ended[request.sample_id] = progress
            elif progress.completion is not None:
                self._parts[request.sample_id] = progress.completion

    def forget(self, sample_ids: Iterable[str]) -> None:
        """The rollouts of these samples are finished."""
        for name in sample_ids:
            self._ended.pop(name, None)

    async def close(self) -> None:
        """Forget everything: the run ends, or goes back to a checkpoint. The rollouts were cancelled before; a request
        of an environment that has not ended yet is cancelled, too.
        """
        while running := [task for _, task in self._tasks.values()]:
            for task in running:
                task.cancel()
            await asyncio.wait(running)
            await asyncio.sleep(0)  # those that wait for a task take its result
        self._parts.clear()
        self._ended.clear()
