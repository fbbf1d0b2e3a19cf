"""Self-play: the policy answers against a rival, and is rewarded for winning."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from chatlearn_algorithms.grpo import GRPO
from chatlearn_core.protocols import AlgorithmContext
from chatlearn_core.types import RewardResult, Sample
from custom_flow.options import SelfPlayOptions


class SelfPlay(GRPO):
    """Both players answer each prompt; the policy learns from its own answers by their share of wins.

    The role ``rival`` is a generator. With a model of its own it keeps these weights; without one it receives the
    policy's, so that the policy plays against itself.
    """

    def __init__(self, options: SelfPlayOptions, context: AlgorithmContext) -> None:
        super().__init__(options, context)
        self.rival_answers = options.rival_answers

    def flow(self, prompts: Any, m: Any) -> Any:
        """Two generations, joined; the match drops the rival's answers, which are not trained on."""
        ours = m.generator.generate(prompts)
        theirs = m.rival.generate(prompts, n=self.rival_answers)
        both = m.join_groups(ours, theirs)
        scored = m.join(both, m.reward.score(both))
        played = m.apply("custom_flow.self_play:play", scored, rival="rival")
        return m.join(played, m.trainer.logprobs(played))


def play(samples: Sequence[Sample], rival: str) -> list[Sample]:
    """Reward each answer of the policy by the share of the rival's answers that score less; a draw counts half.

    Args:
        samples: the scored answers of both players to one prompt.
        rival: the generator role of the answers to beat.
    """
    theirs = [score(sample) for sample in samples if sample.turns[-1].generator == rival]
    if not theirs:  # none could be sampled or scored: no match, nothing to learn
        return []

    def played(sample: Sample) -> Sample:
        own = score(sample)
        wins = sum(1.0 if own > other else 0.5 if own == other else 0.0 for other in theirs)
        return replace(sample, reward=RewardResult(wins / len(theirs), {"score": own}))

    return [played(sample) for sample in samples if sample.turns[-1].generator != rival]


def score(sample: Sample) -> float:
    """What the reward role said; a sample that it could not score has been left out."""
    assert sample.reward is not None
    assert sample.reward.value is not None
    return sample.reward.value
