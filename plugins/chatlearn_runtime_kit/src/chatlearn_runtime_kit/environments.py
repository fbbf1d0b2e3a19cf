"""Environments in this process, on their own event loop, so that a blocking tool delays nothing else."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, ChatLearnError, ContractError
from chatlearn_core.plugins.records import EnvironmentSpec
from chatlearn_core.plugins.validation import short
from chatlearn_core.protocols import Environment, GenerateFor, OnTokens, RolloutContext, RolloutOrder
from chatlearn_core.runtime.boundary import checked_reward
from chatlearn_core.runtime.plan import RolePlan, RunPlan, UsedRole
from chatlearn_core.types import Completion, GenerateRequest, RewardResult, Rollout, Sample
from chatlearn_core.types.sample import RolloutStatus
from chatlearn_runtime_kit.own_time import OwnTime

MAX_TOKEN_ID = 2**31 - 1
"""No vocabulary has a larger id."""
_KINDS = {"iu": "integers", "b": "booleans", "biuf": "numbers or booleans"}
_STOP_S = 5.0
"""Time limit for an environment's loop to end, seconds; after it the daemon thread is abandoned."""


@dataclass(slots=True, frozen=True)
class EnvironmentRole:
    """The facts about a role that hosting its environment requires. Picklable."""

    name: str
    plugin: str
    handles: tuple[str, ...]
    """Handles of the generators that it calls."""
    policy: str
    """Handle of the generator whose tokens are trained on."""
    timeout_s: float
    uses: Mapping[str, UsedRole] = field(default_factory=dict)
    """Handle -> the generator."""

    @staticmethod
    def of(role: RolePlan, plan: RunPlan) -> EnvironmentRole:
        """From the plan."""
        record = role.backend.record
        assert isinstance(record, EnvironmentSpec), f"role {role.name} is a {role.kind}"
        uses = plan.used_by(role.backend)
        return EnvironmentRole(role.name, record.name, tuple(uses), record.uses[0], role.timeout_s, uses)


class LocalEnvironments:
    """An environment in this process, on its own event loop: one object that makes many rollouts concurrently.

    Args:
        role: the environment's role.
        environment: built, not yet set up.
        tokenizer: tokenizer of the run's model.
    """

    def __init__(self, role: EnvironmentRole, environment: Environment, tokenizer: Any) -> None:
        self.role = role
        self.environment = environment
        self.tokenizer = tokenizer
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"environment {role.name}", daemon=True)

    @property
    def name(self) -> str:
        return self.role.name

    async def start(self) -> None:
        """Set the environment up on its own thread.

        Raises:
            BackendError, BackendTimeoutError: the environment does not start.
        """
        self._thread.start()

        async def set_up() -> None:
            self.environment.setup()

        try:
            async with asyncio.timeout(self.role.timeout_s):
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(set_up(), self._loop))
        except TimeoutError as error:
            raise BackendTimeoutError(
                f"environment role {self.name!r} was not set up within {self.role.timeout_s:g} s "
                f"(roles.{self.name}.timeout_s)"
            ) from error
        except ChatLearnError:
            raise
        except Exception as error:
            raise BackendError(
                f"environment {self.role.plugin!r} of role {self.name!r} does not start: "
                f"{type(error).__name__}: {error}"
            ) from error

    async def rollout(self, order: RolloutOrder, generate: GenerateFor) -> Rollout:
        """See ``EnvironmentGroup``. Time spent waiting for generators does not count towards the timeout."""
        here = asyncio.get_running_loop()
        pending: set[concurrent.futures.Future[Completion]] = set()
        clock = OwnTime(order.timeout_s)

        async def generate_here(
            handle: str, request: GenerateRequest, on_tokens: OnTokens | None = None, /
        ) -> Completion:
            if handle not in self.role.handles:
                raise ContractError(
                    f"environment role {self.name!r} has no generator by the handle {handle!r}; its handles are "
                    f"{', '.join(self.role.handles)} (roles.{self.name}.uses)"
                )
            asking = generate(handle, request, None if on_tokens is None else self._here(on_tokens))
            asked = asyncio.run_coroutine_threadsafe(clock.without(asking), here)
            pending.add(asked)
            try:
                return await asyncio.wrap_future(asked)
            finally:
                pending.discard(asked)

        context = RolloutContext(order, self.tokenizer, generate_here, self.role.policy)
        prompt = order.example.prompt
        playing = asyncio.run_coroutine_threadsafe(self.environment.rollout(prompt, context), self._loop)
        try:
            async with clock.limit:
                rollout = await asyncio.wrap_future(playing)
        except TimeoutError as error:
            playing.cancel()
            for asked in tuple(pending):
                asked.cancel()
            raise BackendTimeoutError(
                f"rollout {order.id} of environment role {self.name!r} was not finished within {order.timeout_s:g} s "
                f"(roles.{self.name}.timeout_s)"
            ) from error
        except ChatLearnError:
            raise
        except Exception as error:
            raise BackendError(
                f"environment {self.role.plugin!r} raised {type(error).__name__} in rollout {order.id}: {error}"
            ) from error
        finally:
            clock.over = True
        if clock.lost:
            raise clock.lost[0]
        return checked_rollout(rollout, order, self.role)

    def _here(self, on_tokens: OnTokens) -> OnTokens:
        """``on_tokens`` for calls from another event loop."""

        def told(start: int, token_ids: list[int]) -> None:
            with contextlib.suppress(RuntimeError):  # the environment's loop has ended
                self._loop.call_soon_threadsafe(on_tokens, start, token_ids)

        return told

    def close(self) -> None:
        """Close the environment and end its loop. Safe to call twice."""
        if self._loop.is_closed():
            return
        try:
            self.environment.close()
        finally:
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(_STOP_S)
            if not self._thread.is_alive():
                self._loop.close()


def checked_rollout(rollout: Any, order: RolloutOrder, role: EnvironmentRole) -> Rollout:
    """Check that a rollout fulfils its order, and return it.

    Raises:
        ContractError: it does not; names role, rollout and rule.
    """
    problem = _problem(rollout, order)
    if problem is not None:
        raise ContractError(f"environment {role.plugin!r} (role {role.name!r}), rollout {order.id}: {problem}")
    assert isinstance(rollout, Rollout)
    return rollout


def _problem(rollout: Any, order: RolloutOrder) -> str | None:
    if not isinstance(rollout, Rollout):
        return f"it returned {type(rollout).__name__}; Environment.rollout returns a Rollout (context.finished)"
    if (rollout.id, rollout.group_id) != (order.id, order.group_id):
        return f"it returned the rollout {rollout.id} of group {rollout.group_id}"
    if not rollout.samples:
        return "it has no sample"
    for sample in rollout.samples:
        if not isinstance(sample, Sample) or not isinstance(sample.id, str):
            return f"one of its samples is {short(sample)}; context.sequence makes samples"
    if _repeated([sample.id for sample in rollout.samples]):
        return "two of its samples have one id; context.sequence(suffix) tells them apart"
    if rollout.status not in get_args(RolloutStatus):
        return f"its status is {rollout.status!r:.80}; it is one of {', '.join(get_args(RolloutStatus))}"
    for sample in rollout.samples:
        if problem := _reward_problem(rollout.reward, sample) or _reward_problem(sample.reward, sample):
            return f"{problem} (sample {sample.id!r})"
        if problem := _array_problem(sample):
            return f"its sample {sample.id!r} has {problem}"
        length = len(sample.token_ids)
        if not sample.id.startswith(order.id):
            return f"the id of its sample {sample.id!r} does not begin with the rollout's"
        if length > order.max_tokens:
            return f"its sample {sample.id!r} has {length} tokens; the longest sequence has {order.max_tokens}"
        for name, values in {"loss_mask": sample.loss_mask, **sample.token_data}.items():
            if len(values) != length:
                return f"{name} of its sample {sample.id!r} has {len(values)} entries for {length} tokens"
        sampled = np.zeros(length, np.bool_)
        for turn in sample.turns:
            sampled[turn.start : turn.stop] = True
        if (sample.loss_mask & ~sampled).any():
            return f"the loss mask of its sample {sample.id!r} covers tokens that the policy did not sample"
    return None


def _reward_problem(reward: RewardResult | None, sample: Sample) -> str | None:
    if reward is None:
        return None
    error = checked_reward(reward, sample).error
    return (
        f"its reward cannot be used: {error}" if error is not None and error != getattr(reward, "error", None) else None
    )


def _array_problem(sample: Sample) -> str | None:
    """The problem with the values of a sample's arrays, or None."""
    arrays = {"token_ids": sample.token_ids, "loss_mask": sample.loss_mask} | sample.token_data
    for name, values in arrays.items():
        kinds = {"token_ids": "iu", "loss_mask": "b"}.get(name, "biuf")
        if not isinstance(values, np.ndarray) or values.dtype.kind not in kinds or not values.ndim:
            return f"{name} as {short(values)}, not an array of {_KINDS[kinds]}"
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            return f"a value of {name} that is not finite"
    ids = sample.token_ids
    if ids.size and (ids.min() < 0 or ids.max() > MAX_TOKEN_ID):
        return f"the token id {int(ids.min() if ids.min() < 0 else ids.max())}, which no vocabulary has"
    return None


def _repeated(names: Collection[str]) -> bool:
    return len(set(names)) < len(names)
