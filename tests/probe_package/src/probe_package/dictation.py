"""An environment of two turns; what it says in between is not learned."""

import numpy as np

from chatlearn_core.protocols import RoleContext, RolloutContext
from chatlearn_core.types import Prompt, RewardResult, Rollout
from probe_package.options import DictationOptions


class Dictation:
    """Repeats the prompt's first tokens to the policy, and rewards what of them the second turn has."""

    def __init__(self, options: DictationOptions, context: RoleContext) -> None:
        self.options = options

    def setup(self) -> None:
        """Nothing to load."""

    def close(self) -> None:
        """Nothing to release."""

    async def rollout(self, prompt: Prompt, context: RolloutContext) -> Rollout:
        sequence = context.sequence()
        sequence.sampled(await context.generate(sequence.token_ids))
        dictated = prompt.token_ids[: self.options.dictated]
        sequence.observed(dictated)
        sequence.sampled(await context.generate(sequence.token_ids))
        last = sequence.sample.turns[-1]
        written = sequence.token_ids[last.start : last.stop]
        near = np.abs(written[:, None] - dictated[None, :]).min(axis=1)
        return context.finished([sequence], reward=RewardResult(float(-np.log1p(near).mean())))
