"""Registers the rewards of this distribution."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import RewardSpec, RoleUse, SampleFilterSpec


@hookimpl
def chatlearn_rewards() -> Iterable[RewardSpec]:
    """Register rules, programs, plain functions, judges and reward models."""
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
            name="multiple_choice",
            summary="The letter that the completion chooses equals the ground truth.",
            factory="chatlearn_rewards.rule_rewards:MultipleChoiceReward",
            options="chatlearn_rewards.rule_options:MultipleChoiceOptions",
            check_ground_truth="chatlearn_rewards.rule_rewards:choice_problem",
        ),
        RewardSpec(
            name="exact_match",
            summary="The completion, or its answer, equals the ground truth.",
            factory="chatlearn_rewards.rule_rewards:ExactMatchReward",
            options="chatlearn_rewards.rule_options:ExactMatchOptions",
            check_ground_truth="chatlearn_rewards.answer_text:text_problem",
        ),
        RewardSpec(
            name="fuzzy_match",
            summary="Similarity of the completion, or its answer, to the ground truth.",
            factory="chatlearn_rewards.pooled_rules:FuzzyMatchReward",
            options="chatlearn_rewards.rule_options:FuzzyMatchOptions",
            check_ground_truth="chatlearn_rewards.answer_text:text_problem",
        ),
        RewardSpec(
            name="json_schema",
            summary="The completion is JSON that a schema allows.",
            factory="chatlearn_rewards.pooled_rules:JsonSchemaReward",
            options="chatlearn_rewards.rule_options:JsonSchemaOptions",
            check_ground_truth="chatlearn_rewards.pooled_rules:row_schema_problem",
        ),
        RewardSpec(
            name="length",
            summary="The completion's length is within limits, or near them.",
            factory="chatlearn_rewards.rule_rewards:LengthReward",
            options="chatlearn_rewards.rule_options:LengthOptions",
        ),
        RewardSpec(
            name="repetition",
            summary="A penalty for repeated n-grams.",
            factory="chatlearn_rewards.rule_rewards:RepetitionReward",
            options="chatlearn_rewards.rule_options:RepetitionOptions",
        ),
        RewardSpec(
            name="function",
            summary="A plain Python function by import path or file.",
            factory="chatlearn_rewards.function_reward:FunctionReward",
            options="chatlearn_rewards.options:FunctionOptions",
            gives_steps=True,
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
            summary="The verdict of a generator role or a remote endpoint on the question and the answer.",
            factory="chatlearn_rewards.judge_reward:JudgeReward",
            options="chatlearn_rewards.judge_options:JudgeOptions",
            uses={"judge": RoleUse()},
        ),
        RewardSpec(
            name="http",
            summary="Scores of a remote reward server, which is sent batches of samples as JSON.",
            factory="chatlearn_rewards.http_reward:HttpReward",
            options="chatlearn_rewards.http_options:HttpOptions",
            gives_steps=True,
        ),
        RewardSpec(
            name="process",
            summary="Rewards of the steps of a completion: by checking their arithmetic, or from a reward model.",
            factory="chatlearn_rewards.process_reward:ProcessReward",
            options="chatlearn_rewards.process_options:ProcessOptions",
            unit="group",
            gives_steps=True,
            uses={
                "model": RoleUse(
                    kinds=frozenset({"trainer"}), outputs=frozenset({"scores"}), scores=False, token_ids=True
                )
            },
        ),
        RewardSpec(
            name="model",
            summary="A reward model: a trainer role with head reward, or a classifier or logprobs of a generator role.",
            factory="chatlearn_rewards.model_reward:ModelReward",
            options="chatlearn_rewards.model_options:ModelOptions",
            unit="group",
            uses={
                "model": RoleUse(
                    kinds=frozenset({"generator", "trainer"}),
                    outputs=frozenset({"scores"}),
                    scores=True,
                    classifies=True,
                    token_ids=True,
                )
            },
        ),
    ]


@hookimpl
def chatlearn_sample_filters() -> Iterable[SampleFilterSpec]:
    """What happens to rewards before they are trained on."""
    return [
        SampleFilterSpec(
            name="running_normalisation",
            summary="Rewards less their running mean, divided by their running standard deviation",
            factory="chatlearn_rewards.running_normalisation:RunningNormalisation",
            options="chatlearn_rewards.normalisation_options:NormalisationOptions",
        )
    ]
