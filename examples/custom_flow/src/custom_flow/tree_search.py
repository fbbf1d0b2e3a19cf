"""Tree search: an environment that expands an answer round by round."""

import asyncio
from dataclasses import replace

from chatlearn_core.protocols import RoleContext, RolloutContext
from chatlearn_core.types import Completion, Prompt, Rollout
from custom_flow.options import TreeSearchOptions


class TreeSearch:
    """In each round, samples ``width`` continuations of the best prefix and keeps the best of them.

    The sample to train on is the path from the root to the last leaf. The other branches are dropped.
    ``max_turns`` of the environment's role counts every branch as a turn.
    """

    def __init__(self, options: TreeSearchOptions, context: RoleContext) -> None:
        self.options = options

    def setup(self) -> None:
        """Nothing to load."""

    def close(self) -> None:
        """Nothing to release."""

    async def rollout(self, prompt: Prompt, context: RolloutContext) -> Rollout:
        """Stop after ``rounds``, when the best branch ends, or when the sequence has its maximum length."""
        sampling = replace(context.sampling, max_tokens=self.options.round_tokens)
        path = context.sequence()
        for _ in range(self.options.rounds):
            if len(path.token_ids) >= context.max_tokens:
                break
            branches = await asyncio.gather(
                *(context.generate(path.token_ids, sampling=sampling) for _ in range(self.options.width))
            )
            best = max(branches, key=confidence)
            path.sampled(best)
            if best.finish_reason == "stop":
                break
        return context.finished([path])


def confidence(branch: Completion) -> float:
    """Mean logprob of the branch's tokens."""
    return float(branch.logprobs.mean())
