"""A second reward model whose score is mixed into the reward."""

from typing import Any

from torch import Tensor

from chatlearn_algorithms.grpo import GRPO
from chatlearn_core.protocols import AlgorithmContext
from chatlearn_core.types import TrainBatch
from custom_flow.options import MixedRewardsOptions


class MixedRewards(GRPO):
    """GRPO on reward + ``style_weight`` · score of the role ``style``, a trainer role with ``head: reward``."""

    def __init__(self, options: MixedRewardsOptions, context: AlgorithmContext) -> None:
        super().__init__(options, context)
        self.style_weight = options.style_weight

    def parts(self, samples: Any, m: Any) -> list[Any]:
        """Those of GRPO, and the score, which arrives as ``sequence_data["style_scores"]``."""
        return [*super().parts(samples, m), m.style.scores(samples)]

    def bonus(self, batch: TrainBatch) -> Tensor:
        """[S] what is added to the rewards, besides what GRPO adds for long completions."""
        style, shaping = self.style_weight * batch.sequence_data["style_scores"], super().bonus(batch)
        return style if shaping is None else style + shaping
