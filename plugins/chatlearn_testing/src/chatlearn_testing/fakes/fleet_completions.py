"""Answers a flow's calls on generators without a rollout manager."""

from __future__ import annotations

from chatlearn_core.executor.step_samples import RolloutRequest
from chatlearn_core.protocols import Runtime
from chatlearn_core.types import Completion


class FleetCompletions:
    """Passes requests to the fleet directly: a ``GeneratorFront``."""

    turns_together = True

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def begin(self) -> None:
        """Nothing to prepare."""

    async def completion(self, role: str, request: RolloutRequest) -> Completion:
        """See ``CompletionSource``."""
        assert request.generate_request is not None, "a flow over prompts gives every rollout a generation request"
        return await self.runtime.generator(role).generate(request.generate_request)
