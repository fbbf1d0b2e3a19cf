"""Registers the rewards of this distribution."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import RewardSpec


@hookimpl
def chatlearn_rewards() -> Iterable[RewardSpec]:
    """``math``, ``gsm8k``, ``format`` and ``function``."""
    return [
        RewardSpec(
            name="math",
            summary="Mathematical equivalence of the final answer and the ground truth (math-verify).",
            factory="chatlearn_rewards.math_reward:MathReward",
            options="chatlearn_rewards.options:MathOptions",
            check_ground_truth="chatlearn_rewards.ground_truths:math_problem",
        ),
        RewardSpec(
            name="gsm8k",
            summary="The number after ####, or the last one, equals the ground truth.",
            factory="chatlearn_rewards.gsm8k_reward:Gsm8kReward",
            options="chatlearn_rewards.options:Gsm8kOptions",
            check_ground_truth="chatlearn_rewards.ground_truths:gsm8k_problem",
        ),
        RewardSpec(
            name="format",
            summary="The completion matches a regular expression.",
            factory="chatlearn_rewards.format_reward:FormatReward",
            options="chatlearn_rewards.options:FormatOptions",
        ),
        RewardSpec(
            name="function",
            summary="A plain Python function by import path or file.",
            factory="chatlearn_rewards.function_reward:FunctionReward",
            options="chatlearn_rewards.options:FunctionOptions",
        ),
    ]
