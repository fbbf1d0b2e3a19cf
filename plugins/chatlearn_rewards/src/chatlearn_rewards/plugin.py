"""Registers the rewards of this distribution."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import RewardSpec, RoleUse


@hookimpl
def chatlearn_rewards() -> Iterable[RewardSpec]:
    """``math``, ``gsm8k``, ``format``, ``function``, ``code``, ``judge`` and ``model``."""
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
        RewardSpec(
            name="code",
            summary="The completion's program passes the row's tests, in a sandbox.",
            factory="chatlearn_rewards.code_reward:CodeReward",
            options="chatlearn_rewards.code_options:CodeOptions",
            check_ground_truth="chatlearn_rewards.code_reward:code_problem",
        ),
        RewardSpec(
            name="judge",
            summary="The verdict of a generator role that is shown the question and the answer.",
            factory="chatlearn_rewards.judge_reward:JudgeReward",
            options="chatlearn_rewards.judge_options:JudgeOptions",
            uses={"judge": RoleUse()},
        ),
        RewardSpec(
            name="model",
            summary="A reward model: a trainer role with head reward, or what a generator role makes of the answer.",
            factory="chatlearn_rewards.model_reward:ModelReward",
            options="chatlearn_rewards.model_options:ModelOptions",
            unit="group",
            uses={
                "model": RoleUse(
                    kinds=frozenset({"generator", "trainer"}),
                    outputs=frozenset({"scores"}),
                    scores=True,
                    token_ids=True,
                )
            },
        ),
    ]
