"""GRPO that draws more prompts until a step has enough."""

from collections.abc import Sequence

from chatlearn_algorithms.grpo import GRPO
from chatlearn_core.protocols import AlgorithmContext
from chatlearn_core.types import Sample
from probe_package.options import RefilledOptions


class Refilled(GRPO):
    """Draws several prompts at a time: those that are too many wait for the next step."""

    def __init__(self, options: RefilledOptions, context: AlgorithmContext) -> None:
        super().__init__(options, context)
        self.num_groups, self.refill = options.num_groups, options.refill

    def wanted(self, samples: Sequence[Sample]) -> int:
        return self.refill if len({sample.group_id for sample in samples}) < self.num_groups else 0
