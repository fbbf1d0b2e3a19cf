"""``environment.rollout``: executes a flow's call on an environment for its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, RoleLostError, TurnLimitError
from chatlearn_core.executor.flow_calls import sampled_as
from chatlearn_core.executor.scheduler import FlowCall
from chatlearn_core.executor.step_samples import RolloutRequest, without_completion
from chatlearn_core.plugins.records import EnvironmentSpec
from chatlearn_core.protocols import OnTokens, RolloutOrder
from chatlearn_core.runtime.plan import RolePlan
from chatlearn_core.types import Completion, GenerateRequest, Rollout


class TurnWaves:
    """Synchronises the requests of concurrent rollouts: they proceed when every unfinished rollout has made one.

    This makes the generator's batches independent of how long environments take, so that a resumed run samples the same
    tokens, bit for bit. The price: a slow tool delays the other rollouts of its step. Where timing matters anyway
    (``CompletionSource.turns_together``) nothing is synchronised.

    Args:
        num_rollouts: number of participating rollouts.
        together: False: requests proceed at once.
    """

    def __init__(self, num_rollouts: int, together: bool = True) -> None:
        self.together = together
        self._left = num_rollouts
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}

    async def join(self, index: int) -> None:
        """Rollout ``index`` makes a request: wait until all unfinished rollouts have made one."""
        if not self.together:
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(index, []).append(place)
        self._go_on()
        try:
            await place
        except asyncio.CancelledError:
            self._give_up(index, place)
            raise

    def _give_up(self, index: int, place: asyncio.Future[None]) -> None:
        """A request is withdrawn: its rollout has ended, or is repeated after its worker died."""
        places = self._waiting.get(index, [])
        if place in places:
            places.remove(place)
            if not places:
                del self._waiting[index]

    def leave(self, index: int) -> None:
        """Rollout ``index`` has ended."""
        self._left -= 1
        self._waiting.pop(index, None)
        self._go_on()

    def _go_on(self) -> None:
        if self._waiting and len(self._waiting) == self._left:
            wave, self._waiting = self._waiting, {}
            for index in sorted(wave):
                for place in wave[index]:
                    if not place.done():  # done if its rollout was cancelled
                        place.set_result(None)


async def rollout(call: FlowCall, requests: Sequence[RolloutRequest]) -> None:
    """Make the rollouts of all requests concurrently. A rollout that fails is excluded."""
    waves = TurnWaves(len(requests), call.source.turns_together)

    async def one(index: int, request: RolloutRequest) -> None:
        try:
            await _one(call, request, lambda: waves.join(index))
        finally:
            waves.leave(index)
        if not waves.together:
            call.done(request)  # later calls need not wait for the slowest rollout

    async with asyncio.TaskGroup() as tasks:
        for index, request in enumerate(requests):
            tasks.create_task(one(index, request))


async def _one(call: FlowCall, request: RolloutRequest, turn: Callable[[], Awaitable[None]]) -> None:
    plan, asked = call.plan, request.generate_request
    assert plan is not None, "an environment is planned"
    assert asked is not None, "an environment takes prompts"
    role = plan.roles[call.node.role]
    order = RolloutOrder(
        id=request.sample_id,
        group_id=request.group_id,
        example=request.draw.example,
        sampling=sampled_as(call.node.arguments, asked.sampling),
        seed=asked.sampling.seed,
        max_tokens=call.max_length,
        timeout_s=role.timeout_s,
        max_turns=role.max_turns,
    )

    async def generate(handle: str, wanted: GenerateRequest, on_tokens: OnTokens | None = None, /) -> Completion:
        await turn()
        asking = RolloutRequest(request.sample_id, request.draw, wanted, on_tokens=on_tokens)
        found = await call.source.completion(role.uses[handle], asking)
        assert found is not None, "partial rollouts are refused beside environments"
        [completion] = await call.runtime.data.aget_completions([found])
        return completion

    try:
        made = await call.runtime.environment(call.node.role).rollout(order, generate)
    except RoleLostError:
        raise
    except BackendTimeoutError as error:
        request.sample = without_completion(request, f"environment timed out: {error}")
    except TurnLimitError as error:
        request.sample = without_completion(request, f"turn limit exceeded: {error}")
    except BackendError as error:
        request.sample = without_completion(request, f"environment failed: {error}")
    else:
        _take(request, made, role)


def _take(request: RolloutRequest, made: Rollout, role: RolePlan) -> None:
    record = role.backend.record
    assert isinstance(record, EnvironmentSpec), f"role {role.name} is a {role.kind}"
    generator = role.uses[record.uses[0]]
    samples = []
    for sample in made.samples:
        turns = tuple(replace(turn, generator=turn.generator or generator) for turn in sample.turns)
        sample = replace(sample, turns=turns, reward=sample.reward or made.reward)
        if not sample.loss_mask.any():
            sample.exclusion = "empty_completion"
        if made.status == "failed":
            sample.exclusion = "environment failed: it gave the rollout up"
        samples.append(sample)
    request.sample, *request.extras = samples
