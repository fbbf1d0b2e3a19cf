"""Registers the algorithms of this distribution."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import AlgorithmSpec

_ROLLOUT_ROLES = (("generator", "generator"), ("reward", "reward"), ("trainer", "trainer"))


@hookimpl
def chatlearn_algorithms() -> Iterable[AlgorithmSpec]:
    """GRPO, Dr.GRPO and supervised fine-tuning."""
    return [
        AlgorithmSpec(
            name="grpo",
            summary="Group relative policy optimization (arXiv 2402.03300)",
            factory="chatlearn_algorithms.grpo:GRPO",
            options="chatlearn_algorithms.grpo_options:GRPOOptions",
            roles=_ROLLOUT_ROLES,
        ),
        AlgorithmSpec(
            name="dr_grpo",
            summary="GRPO without its length and difficulty biases (arXiv 2503.20783)",
            factory="chatlearn_algorithms.grpo:GRPO",
            options="chatlearn_algorithms.grpo_options:DrGRPOOptions",
            roles=_ROLLOUT_ROLES,
        ),
        AlgorithmSpec(
            name="sft",
            summary="Supervised fine-tuning on demonstrations",
            factory="chatlearn_algorithms.sft:SFT",
            options="chatlearn_algorithms.sft_options:SFTOptions",
            roles=(("trainer", "trainer"),),
        ),
    ]
