"""A plugin with flows that extend, apply a function, join groups and score given tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from chatlearn_algorithms.grpo import GRPO
from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import AlgorithmSpec
from chatlearn_core.types import Sample

HINT = (7, 11, 13)


def with_hint(samples: Sequence[Sample]) -> list[Sample]:
    """Append tokens to each answer that were not sampled."""
    return [replace(sample, token_ids=np.concatenate([sample.token_ids, np.array(HINT)])) for sample in samples]


class TwoPlayers(GRPO):
    """The policy answers in two turns with a hint between them; a rival of the same group answers once."""

    rescores = False

    def flow(self, prompts: Any, m: Any) -> Any:
        ours = m.generator.extend(m.apply("flow_players:with_hint", m.generator.generate(prompts)))
        both = m.join_groups(ours, m.rival.generate(prompts, n=1))
        calls = [m.reward.score(both), m.trainer.logprobs(both)]
        if self.rescores:
            calls.append(m.generator.score(both))
        return m.join(both, *calls)


class RescoredPlayers(TwoPlayers):
    """The policy's generator also scores every token, those of the rival included."""

    rescores = True


class Algorithms:
    """A plugin with both."""

    @staticmethod
    @hookimpl
    def chatlearn_algorithms() -> list[AlgorithmSpec]:
        roles = (("generator", "generator"), ("rival", "generator"), ("reward", "reward"), ("trainer", "trainer"))
        options = "chatlearn_algorithms.grpo_options:GRPOOptions"
        return [
            AlgorithmSpec(name=name, factory=f"flow_players:{factory}", options=options, roles=roles)
            for name, factory in (("two_players", "TwoPlayers"), ("rescored_players", "RescoredPlayers"))
        ]
