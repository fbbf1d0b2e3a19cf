"""Users' functions that flows apply to samples: called off the event loop, with their results checked."""

from __future__ import annotations

import asyncio
import inspect
import threading
import traceback
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from chatlearn_core.exceptions import BackendTimeoutError, FlowError
from chatlearn_core.flow.graph import FunctionCall
from chatlearn_core.runtime.boundary import checked_reward
from chatlearn_core.runtime.serial_executor import SerialExecutor
from chatlearn_core.types import NOT_SAMPLED, Sample

_SHOWN = 3
"""Number of sample ids in a message."""


class FlowFunctions:
    """Calls functions without blocking the run's event loop: ordinary functions one after another in a thread, async
    functions concurrently on an event loop of their own.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads: dict[str, tuple[SerialExecutor, asyncio.Lock]] = {}

    async def call(
        self,
        function: FunctionCall,
        samples: Sequence[Sample],
        arguments: dict[str, Any],
        *,
        drop: Collection[str] = (),
    ) -> dict[str, Sample]:
        """The function's results by sample id; samples that it leaves out are missing.

        The function receives copies, whose arrays are read-only.

        Args:
            samples: have plain arrays.
            drop: names of data to drop from samples that got further tokens, because it does not cover them.

        Raises:
            FlowError: the function raised, or its result breaks a rule; names function, file and sample.
            BackendTimeoutError: no result within the function's timeout.
        """
        copies = [_copied(sample) for sample in samples]
        where = f"{function.place}, applied to {_named(samples)}"
        is_async = inspect.iscoroutinefunction(function.function)
        returned, error = await (self._await if is_async else self._call)(function, copies, arguments, where)
        if error is not None:
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
            at = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
            raise FlowError(f"{where}: {type(error).__name__}: {error}{at}") from error
        return checked_result(returned, samples, where, drop)

    def close(self) -> None:
        """End the threads; one that is inside a function ends when the function returns."""
        for thread, _ in self._threads.values():
            thread.stop()
        self._threads.clear()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    async def _call(
        self, function: FunctionCall, samples: list[Sample], arguments: dict[str, Any], where: str
    ) -> tuple[Any, BaseException | None]:
        """Result or error of an ordinary function. Its timeout starts when the thread begins to run it."""

        def guarded() -> tuple[Any, BaseException | None]:
            try:
                return function.function(samples, **arguments), None
            except (Exception, SystemExit) as error:
                return None, error

        if function.name not in self._threads:
            self._threads[function.name] = SerialExecutor(function.name, function.timeout_s), asyncio.Lock()
        thread, turn = self._threads[function.name]
        async with turn:
            try:
                return await thread.run("apply", guarded, timeout_s=function.timeout_s)
            except BackendTimeoutError as error:
                raise _timed_out(function, where).at(error.place, error.stack) from error

    async def _await(
        self, function: FunctionCall, samples: list[Sample], arguments: dict[str, Any], where: str
    ) -> tuple[Any, BaseException | None]:
        """Result or error of an async function."""

        async def guarded() -> tuple[Any, BaseException | None]:
            try:
                return await function.function(samples, **arguments), None
            except (Exception, SystemExit) as error:
                return None, error

        pending = asyncio.run_coroutine_threadsafe(guarded(), self._running_loop())
        limit = asyncio.timeout(function.timeout_s)
        try:
            async with limit:
                return await asyncio.wrap_future(pending)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise _timed_out(function, where) from error

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_serve, args=(self._loop,), name="flow-functions", daemon=True).start()
        return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _timed_out(function: FunctionCall, where: str) -> BackendTimeoutError:
    return BackendTimeoutError(f"{where}: no result within {function.timeout_s:g} s (m.apply(..., timeout_s=...))")


def checked_result(returned: Any, samples: Sequence[Sample], where: str, drop: Collection[str]) -> dict[str, Sample]:
    """The samples that a function returned, by id.

    Raises:
        FlowError: the result is not a list of given samples, or the function changed something it must not change.
    """
    if not isinstance(returned, list | tuple):
        raise FlowError(f"{where}: it returned a {type(returned).__name__}; it must return a list of the samples")
    given = {sample.id: sample for sample in samples}
    found: dict[str, Sample] = {}
    for item in returned:
        if not isinstance(item, Sample):
            raise FlowError(f"{where}: its list holds a {type(item).__name__}; it must hold samples")
        if item.id not in given or item.id in found:
            what = "twice" if item.id in found else "but was not given it"
            raise FlowError(
                f"{where}: it returned sample {item.id!r} {what}. It returns each given sample once, or leaves it out"
            )
        found[item.id] = _checked_sample(given[item.id], item, where, drop)
    return found


def _checked_sample(before: Sample, after: Sample, where: str, drop: Collection[str]) -> Sample:
    """The changed sample, with its per-token data extended to all tokens."""
    subject = f"{where}: sample {before.id!r}"
    if (after.group_id, after.turns, after.num_prompt_tokens) != (
        before.group_id,
        before.turns,
        before.num_prompt_tokens,
    ):
        raise FlowError(
            f"{subject}: the function changed its group, its turns or the end of its prompt, which record"
            " how it was sampled"
        )
    old, new = len(before.token_ids), len(after.token_ids)
    mask = np.asarray(after.loss_mask)
    if new < old or not np.array_equal(np.asarray(after.token_ids)[:old], before.token_ids):
        raise FlowError(
            f"{subject}: its {old} tokens changed; a function may only add tokens behind them, such as what somebody "
            "else says before the next turn"
        )
    if len(mask) == old:
        mask = np.concatenate([mask, np.zeros(new - old, np.bool_)])
    if len(mask) != new or (mask[:old] & ~before.loss_mask).any() or mask[old:].any():
        raise FlowError(
            f"{subject}: loss_mask has {len(mask)} entries for {new} tokens, or is True at a token that the policy did "
            "not sample"
        )
    if after.exclusion is not None and not isinstance(after.exclusion, str):
        raise FlowError(
            f"{subject}: exclusion is a {type(after.exclusion).__name__}; it is the reason as text, or None"
        )
    token_data = {name: _whole(name, values, old, new, subject) for name, values in after.token_data.items()}
    sequence_data = dict(after.sequence_data)
    for name, number in sequence_data.items():
        if not isinstance(number, int | float) or not np.isfinite(number):
            raise FlowError(f"{subject}: sequence_data {name!r} is {number!r:.80}; it is a finite number")
    reward = after.reward
    if reward is not before.reward and reward is not None:
        reward = checked_reward(reward, after)
        if reward.error is not None:
            raise FlowError(f"{subject}: its reward is not valid: {reward.error}")
    changed = replace(after, loss_mask=mask, token_data=token_data, sequence_data=sequence_data, reward=reward)
    return changed if new == old else _without(changed, drop)


def _whole(name: str, values: Any, old: int, new: int, subject: str) -> Any:
    """[new, ...] per-token data, padded if the function left out the tokens that it added."""
    if len(values) == new:
        return values
    if len(values) != old:
        raise FlowError(f"{subject}: token_data {name!r} has {len(values)} entries for {new} tokens")
    array = np.asarray(values)
    fill = NOT_SAMPLED if name == "policy_version" else 0
    return np.concatenate([array, np.full((new - old, *array.shape[1:]), fill, array.dtype)])


def _without(sample: Sample, names: Collection[str]) -> Sample:
    """The sample without data that does not cover the added tokens."""
    token_data = {name: values for name, values in sample.token_data.items() if name not in names}
    sequence_data = {name: number for name, number in sample.sequence_data.items() if name not in names}
    return replace(sample, token_data=token_data, sequence_data=sequence_data, reward=None)


def _copied(sample: Sample) -> Sample:
    """The sample with its own dictionaries and read-only arrays."""
    arrays = {name: _read_only(values) for name, values in sample.token_data.items()}
    return replace(
        sample,
        token_ids=_read_only(sample.token_ids),
        loss_mask=_read_only(sample.loss_mask),
        token_data=arrays,
        sequence_data=dict(sample.sequence_data),
    )


def _read_only(values: Any) -> Any:
    array = values.view()
    array.flags.writeable = False
    return array


def _named(samples: Sequence[Sample]) -> str:
    names = ", ".join(repr(sample.id) for sample in samples[:_SHOWN])
    return f"sample{'s' if len(samples) > 1 else ''} {names}" + (
        f" and {len(samples) - _SHOWN} more" if len(samples) > _SHOWN else ""
    )
