"""Completions that weight syncs interrupt: requests that end or pause in the engine and go on under new weights."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np

from chatlearn_async.admissions import AdmissionLog, Replay
from chatlearn_async.busy_time import BusyTime
from chatlearn_async.options import DuringSync
from chatlearn_core.exceptions import BackendError, ConfigError, RoleLostError
from chatlearn_core.executor.rollouts.manager import Rollouts
from chatlearn_core.executor.rollouts.pending import Group, Progress
from chatlearn_core.executor.step_samples import RolloutRequest
from chatlearn_core.protocols import AtSync, OnTokens
from chatlearn_core.types import Completion, GenerateRequest
from chatlearn_core.types.array_ref import ArrayRef

_RETRY_S = 1.0
"""After this time without an answer, requests are aborted once more: some may have started only then."""
_POLL_S = 0.005
"""How often a run that repeats another looks whether it is as far as the other was at a weight sync."""


class InterruptibleCompletions:
    """Answers the flow's calls on generators: a ``CompletionSource``.

    Between ``interrupt`` and ``resume`` no request of the roles is open, or all are paused in the engine; with
    ``continue``, fleets interrupt those of a replica when it loads weights. A request that was aborted is made again
    with the tokens so far; its random numbers depend on the token, so its tokens are those of the weights that serve
    each of them.

    What every request of a rollout has sampled is kept until its wave ends. A rollout that a checkpoint holds is made
    again from its beginning: requests that it had made are answered from there, as long as their prompts and sampling
    parameters are the same, and it goes on with the first other one.

    Args:
        rollouts: the rollout managers, which send the requests.
        roles: generator roles whose weights change. Requests to others are not interrupted.
        how: what becomes of open requests; with ``wait``, ``interrupt`` is called when there are none.
        at_sync: how fleets interrupt the requests of a replica, with ``continue``.
        log: records the versions of all requests of the roles.
        replay: the record that is repeated.
        turns_together: see ``CompletionSource``.
        resumable: whether the generators resume what was aborted, which ``pause`` uses for checkpoints.
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
        turns_together: bool = True,
        resumable: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rollouts = rollouts
        self.roles = frozenset(roles)
        self.how = how
        self.at_sync = at_sync
        self.log = log
        self.replay = replay
        self.turns_together = turns_together
        self.resumable = resumable
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
        self._made: dict[str, dict[str, Progress]] = {}
        """Sample id -> request id -> how far it is, in the order in which they were made, while its wave is unfinished.
        An unfinished request has its tokens up to the last interruption."""
        self._saved: dict[str, dict[str, Progress]] = {}
        """``_made`` at the last interruption, with plain arrays; requests without tokens are left out."""

    async def completion(self, role: str, request: RolloutRequest) -> Completion:
        """See ``CompletionSource``."""
        asked = request.generate_request
        assert asked is not None, "a flow over prompts gives every rollout a generation request"
        made, digest = self._made.setdefault(request.sample_id, {}), _digest(asked)
        found = made.get(asked.id)
        if found is not None and (found.digest != digest or not digest):
            names = list(made)
            for name in names[names.index(asked.id) :]:  # the rollout goes another way than before
                del made[name]
        found = made.setdefault(asked.id, Progress(digest=digest))
        if not found.ended:
            try:
                if role in self.roles:
                    found = replace(found, completion=await self._uninterrupted(role, request, asked, made))
                else:
                    found = replace(found, completion=await self.rollouts.completion(role, request))
            except RoleLostError:
                raise
            except BackendError as error:
                found = Progress(failure=error, digest=digest)
            made[asked.id] = found
            if self.log is not None and role in self.roles:
                spans = () if found.completion is None else found.completion.version_spans
                self.log.ended(request.sample_id, asked.id, spans)
        if found.failure is not None:
            raise found.failure
        assert found.completion is not None, "what ended has a completion or a failure"
        return found.completion

    async def _uninterrupted(
        self, role: str, request: RolloutRequest, asked: GenerateRequest, made: dict[str, Progress]
    ) -> Completion:
        """The whole completion, however often it is interrupted."""
        while True:
            await self._open.wait()
            progress = made[asked.id]  # with plain arrays, if it was interrupted
            cut = None if self.replay is None else self.replay.cut(self.step, request.sample_id, asked.id)
            if cut is not None:
                resumed = self._resumed
                made[asked.id] = await self._sample_to(cut, role, asked, progress)
                await resumed.wait()
                continue
            number = self._num_interruptions
            if request.on_tokens is not None and progress.completion is not None:
                request.on_tokens(0, progress.completion.token_ids.tolist())
            completion = await self._call(role, replace(asked, resume_from=progress.completion), request.on_tokens)
            was_interrupted = self.how == "continue" or number != self._num_interruptions
            if completion.finish_reason != "abort" or not was_interrupted:
                return completion
            if self.how == "continue":  # no interrupt fetches it
                [completion] = await self.rollouts.runtime.data.aget_completions([completion])
            if len(completion.token_ids):
                made[asked.id] = replace(progress, completion=completion)

    async def _sample_to(self, cut: int, role: str, asked: GenerateRequest, progress: Progress) -> Progress:
        """Sample the tokens that a recorded completion had when it was interrupted.

        Raises:
            ConfigError: the completion ends before.
        """
        if cut <= progress.num_tokens:
            return progress
        short = replace(asked, sampling=replace(asked.sampling, max_tokens=cut), resume_from=progress.completion)
        completion = await self._call(role, short)
        if completion.finish_reason != "length" or len(completion.token_ids) != cut:
            assert self.replay is not None, "cuts come from a record"
            raise ConfigError(
                f"{self.replay.path} (rollout.options.replay) has sample {asked.id!r} unfinished after {cut} tokens at "
                f"the weight sync of step {self.step}, but here it ended after {len(completion.token_ids)} "
                f"({completion.finish_reason}). It belongs to a run with other data, settings or software"
            )
        return replace(progress, completion=replace(completion, sampling=asked.sampling, finish_reason="abort"))

    async def _call(self, role: str, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        task = asyncio.ensure_future(self.rollouts.of(role).generate(request, on_tokens))
        self._tasks[request.id] = role, task
        self.busy.begin()
        try:
            return await task  # a cancellation is passed to the task
        finally:
            self.busy.end()
            del self._tasks[request.id]

    # Weight syncs

    async def interrupt(self, in_flight: Callable[[], Sequence[str]], *, saves: bool = False) -> None:
        """Let no request sample until ``resume``; with ``continue``, let fleets interrupt them.

        Args:
            in_flight: returns the ids of the samples whose rollouts are unfinished, for the record.
            saves: whether a checkpoint follows. Tokens that are paused in an engine would not be in it, so they are
                aborted, if they can be resumed.

        Raises:
            BackendError: a replica that lives could not be asked.
            ConfigError: the record that is repeated does not fit.
        """
        if self.how == "continue":
            for role in self.roles:
                self.rollouts.runtime.generator(role).at_sync = self.at_sync
            await self._fetch_values()
            return
        if self.replay is not None:
            while self.replay.behind(self.step, in_flight(), self._made):
                await asyncio.sleep(_POLL_S)
        self._open.clear()
        if self.how == "pause" and not (saves and self.resumable):
            await self._pause()
        else:
            await self._end_all()
        await self._fetch_values()

    async def _end_all(self) -> None:
        self._num_interruptions += 1
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
        begun = [
            (sample_id, name, progress)
            for sample_id, made in self._made.items()
            for name, progress in made.items()
            if progress.completion is not None or progress.failure is not None
        ]
        found = [progress.completion for _, _, progress in begun if progress.completion is not None]
        plain = iter(await self.rollouts.runtime.data.aget_completions(found))
        self._saved = {}
        for sample_id, name, progress in begun:
            if progress.completion is not None:
                progress = replace(progress, completion=next(plain))
            self._saved.setdefault(sample_id, {})[name] = progress
            if name in self._made.get(sample_id, {}):
                self._made[sample_id][name] = progress

    # Progress

    def progress(self, sample_id: str) -> Progress:
        """How far a sample was at the last interruption."""
        return Progress(turns=self._saved.get(sample_id, {}))

    def restore(self, group: Group) -> None:
        """Take over the progress of a group from a checkpoint."""
        for request, progress in zip(group.requests, group.progress, strict=True):
            self._made[request.sample_id] = dict(progress.turns)

    def forget(self, sample_ids: Iterable[str]) -> None:
        """The rollouts of these samples are finished."""
        for name in sample_ids:
            self._made.pop(name, None)

    async def close(self) -> None:
        """Forget everything: the run ends, or goes back to a checkpoint. The rollouts were cancelled before; a request
        of an environment that has not ended yet is cancelled, too.
        """
        while running := [task for _, task in self._tasks.values()]:
            for task in running:
                task.cancel()
            await asyncio.wait(running)
            await asyncio.sleep(0)  # those that wait for a task take its result
        self._made.clear()


def _digest(asked: GenerateRequest) -> int:
    """Checksum of what determines a request's answer, besides the weights; 0 if its tokens stay with a worker."""
    given = [ids for ids in (asked.prompt_ids, asked.forced_ids) if ids is not None]
    if any(isinstance(ids, ArrayRef) for ids in given):
        return 0
    found = zlib.crc32(repr(asked.sampling).encode())
    for ids in given:
        found = zlib.crc32(np.ascontiguousarray(ids, np.int64).tobytes(), found)
    return found or 1
