"""Roles of the rollout modes' suite that fail on purpose, or take their time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, Field

from chatlearn_core.exceptions import BackendError, TrainerLostError
from chatlearn_core.plugins.records import RuntimeSpec
from chatlearn_core.protocols import OnTokens, Runtime
from chatlearn_core.runtime.plan import RunPlan
from chatlearn_core.types import Completion, GenerateRequest, RewardResult, Sample
from chatlearn_testing.fakes.generator import FakeGenerator
from chatlearn_testing.fakes.options import FakeGeneratorOptions, FakeRewardOptions, FakeTrainerOptions
from chatlearn_testing.fakes.records import FAKE_GENERATOR, FAKE_REWARD, FAKE_TRAINER
from chatlearn_testing.fakes.reward import FakeReward
from chatlearn_testing.fakes.trainer import FakeTrainer

HERE = "chatlearn_testing.suites.rollout_mode_faults"
WORDS = "a fault on purpose"
"""In the message of every fault."""


class FaultyTrainerOptions(FakeTrainerOptions):
    """When the trainer fails, and how long it takes."""

    fails_at: int = Field(0, description="Number of the update that fails, once; 0: none.")
    is_lost: bool = Field(False, description="Whether a rank is lost with it.")
    seconds_per_update: float = Field(0.0, description="Time in which other roles can work, in addition.")


class FaultyGeneratorOptions(FakeGeneratorOptions):
    """Which requests fail."""

    fails_on: tuple[str, ...] = Field((), description="Ids of the requests.")
    dies: bool = Field(False, description="Whether the replica dies of it.")


class FaultyRewardOptions(FakeRewardOptions):
    """Which samples cannot be judged."""

    fails_on: tuple[str, ...] = Field((), description="Their ids.")


class FaultyTrainer(FakeTrainer):
    """Fails in one update."""

    options: FaultyTrainerOptions
    _updates = 0

    def update(self, *arguments: Any) -> Any:
        """See ``Trainer``."""
        self._updates += 1
        time.sleep(self.options.seconds_per_update)  # in a thread of its own
        if self._updates == self.options.fails_at:
            raise (TrainerLostError if self.options.is_lost else BackendError)(WORDS)
        return super().update(*arguments)


class FaultyGenerator(FakeGenerator):
    """Fails in some requests, after a token."""

    options: FaultyGeneratorOptions

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """See ``Generator``."""
        if request.id in self.options.fails_on:
            await asyncio.sleep(self.options.seconds_per_token)
            if self.options.dies:
                self.die(WORDS)
            raise BackendError(WORDS)
        return await super().generate(request, on_tokens)


class FaultyReward(FakeReward):
    """Fails on some samples."""

    options: FaultyRewardOptions

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """See ``Reward``."""
        for sample in samples:
            if sample.id in self.options.fails_on:
                raise BackendError(f"{WORDS}: {sample.id}")
        return await super().score(samples)


def rebuilding_runtime(options: BaseModel, plan: RunPlan) -> Runtime:
    """The local runtime, which goes on after the loss of a trainer, as one with processes does that rebuilds it."""
    runtime: Runtime = plan.registry.load_factory(plan.registry.select("runtime", "local"))(options, plan)

    async def recover(lost: TrainerLostError) -> None:
        """Keep the trainer, whose state the run restores."""

    runtime.recover = recover  # type: ignore[method-assign]  # of this object alone
    return runtime


FAULTS = (
    replace(FAKE_TRAINER, name="faulty", factory=f"{HERE}:FaultyTrainer", options=f"{HERE}:FaultyTrainerOptions"),
    replace(FAKE_GENERATOR, name="faulty", factory=f"{HERE}:FaultyGenerator", options=f"{HERE}:FaultyGeneratorOptions"),
    replace(FAKE_REWARD, name="faulty", factory=f"{HERE}:FaultyReward", options=f"{HERE}:FaultyRewardOptions"),
    RuntimeSpec(
        name="rebuilding",
        factory=f"{HERE}:rebuilding_runtime",
        options="chatlearn_local.options:LocalRuntimeOptions",
        refreshes=True,
    ),
)
"""Records of these roles."""
