"""The base of algorithms that compare the completions of a prompt; with dynamic sampling and overlong shaping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

from chatlearn_algorithms.group_advantages import Floats, derive_group_advantages
from chatlearn_algorithms.policy_gradient import PolicyGradient
from chatlearn_algorithms.policy_gradient_options import GroupOptions
from chatlearn_core.types import Derived, RewardResult, Sample, TrainBatch
from chatlearn_losses import overlong_penalty

GroupT = TypeVar("GroupT", bound=GroupOptions)


class GroupBased(PolicyGradient[GroupT]):
    """A policy gradient that samples several completions of a prompt."""

    def wanted(self, samples: Sequence[Sample]) -> int:
        """Dynamic sampling (arXiv 2503.14476, section 3.2): prompts to draw until a step has its number of groups with
        spread.
        """
        if not self.options.dynamic_sampling:
            return 0
        groups: dict[str, list[RewardResult]] = {}
        for sample in samples:
            if sample.exclusion is None and sample.reward is not None and sample.reward.value is not None:
                groups.setdefault(sample.group_id, []).append(sample.reward)
        missing = self.context.prompts_per_step - sum(self.has_spread(of_group) for of_group in groups.values())
        return math.ceil(max(0, missing) * self.options.oversampling)

    def has_spread(self, rewards: Sequence[RewardResult]) -> bool:
        """Whether the scored completions of a group can teach: not all of their verdicts are equal."""
        return len({verdict(reward) for reward in rewards}) > 1

    def bonus(self, batch: TrainBatch) -> Tensor | None:
        """Soft overlong punishment (arXiv 2503.14476, section 3.4, eq. 13); prompts do not count in lengths."""
        options = self.options
        if options.overlong_buffer is None:
            return None
        lengths = batch.cu_seqlens.diff() - batch.num_prompt_tokens
        longest = options.overlong_length or self.context.max_completion_tokens
        penalty = overlong_penalty(lengths, longest=longest, buffer=options.overlong_buffer)
        return options.overlong_penalty * penalty


class GroupRelative(GroupBased[GroupT]):
    """A policy gradient whose advantages compare the rewards of whole completions; a subclass defines how."""

    def group_advantages(self, rewards: Floats) -> Floats:
        """[G] advantages of one group from its rewards, which are not all equal."""
        raise NotImplementedError

    def advantages(self, batch: TrainBatch, step: int) -> Derived:
        """Compute advantages relative to the other completions of the same prompt."""
        return derive_group_advantages(
            batch,
            self.scored(batch, step),
            self.group_advantages,
            drop_zero_spread=self.options.drop_zero_spread_groups,
        )


def verdict(reward: RewardResult) -> float:
    """The completion's own reward plus those of its tokens."""
    assert reward.value is not None, "callers leave out samples that could not be scored"
    of_tokens = reward.token_values
    return reward.value if of_tokens is None else reward.value + float(of_tokens.sum())
