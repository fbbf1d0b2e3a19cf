"""GRPO on conversations: an answer, a remark on it, another answer, and so on."""

from typing import Any

from chatlearn_algorithms.grpo import GRPO
from chatlearn_core.protocols import AlgorithmContext
from probe_package.options import RoundsOptions

NUM_ROUNDS = 2


class Rounds(GRPO):
    """Two rounds after the first answer; the reward is that of the whole."""

    def __init__(self, options: RoundsOptions, context: AlgorithmContext) -> None:
        super().__init__(options, context)
        self.remark = options.remark

    def flow(self, prompts: Any, m: Any) -> Any:
        roles = self.options.roles
        generator, reward = getattr(m, roles.generator), getattr(m, str(roles.reward))
        samples = generator.generate(prompts)
        for _ in range(NUM_ROUNDS):
            judged = m.join(samples, reward.score(samples))
            samples = generator.extend(
                m.apply("probe_package.revision:remark_on", judged, token=self.remark), max_tokens=3
            )
        return m.join(samples, reward.score(samples), getattr(m, roles.policy).logprobs(samples))
