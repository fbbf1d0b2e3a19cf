"""DAPO (arXiv 2503.14476): GRPO with clip-higher, dynamic sampling, a mean over tokens and overlong shaping.

Clip-higher (section 3.1) and the token mean (3.3) are defaults of the options.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from chatlearn_algorithms.grpo import GroupNormalised
from chatlearn_algorithms.grpo_options import DAPOOptions
from chatlearn_algorithms.policy_gradient import ClippedPolicyGradient
from chatlearn_core.types import Sample, TrainBatch
from chatlearn_losses import overlong_penalty


class DAPO(GroupNormalised[DAPOOptions], ClippedPolicyGradient[DAPOOptions]):
    """Excludes groups whose verdicts are all equal, and samples other groups in their place."""

    def wanted(self, samples: Sequence[Sample]) -> int:
        """Dynamic sampling, section 3.2: prompts to draw until a step has its number of groups with spread."""
        if not self.options.dynamic_sampling:
            return 0
        verdicts: dict[str, set[float]] = {}
        for sample in samples:
            if sample.exclusion is None and sample.reward is not None and sample.reward.value is not None:
                verdicts.setdefault(sample.group_id, set()).add(_verdict(sample.reward.value, sample))
        missing = self.context.prompts_per_step - sum(len(of_group) > 1 for of_group in verdicts.values())
        return math.ceil(max(0, missing) * self.options.oversampling)

    def bonus(self, batch: TrainBatch) -> Tensor | None:
        """Soft overlong punishment, section 3.4, eq. 13; lengths count the tokens after the prompt."""
        options = self.options
        if options.overlong_buffer is None:
            return None
        lengths = batch.cu_seqlens.diff() - batch.num_prompt_tokens
        longest = options.overlong_length or self.context.max_completion_tokens
        penalty = overlong_penalty(lengths, longest=longest, buffer=options.overlong_buffer)
        return options.overlong_penalty * penalty


def _verdict(value: float, sample: Sample) -> float:
    """With the rewards of single tokens."""
    of_tokens = None if sample.reward is None else sample.reward.token_values
    return value if of_tokens is None else value + float(of_tokens.sum())
