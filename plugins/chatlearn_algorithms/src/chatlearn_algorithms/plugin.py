"""Registers the algorithms of this distribution."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import (
    AggregationSpec,
    AlgorithmSpec,
    ExampleKindSpec,
    FlowMethodSpec,
    SampleFilterSpec,
    ScheduleSpec,
    StepPolicySpec,
)


@hookimpl
def chatlearn_algorithms() -> Iterable[AlgorithmSpec]:
    """Register policy gradients, preference learning, distillation and supervised fine-tuning."""
    return [
        *_policy_gradients(),
        AlgorithmSpec(
            name="sft",
            summary="Supervised fine-tuning on demonstrations",
            factory="chatlearn_algorithms.sft:SFT",
            options="chatlearn_algorithms.sft_options:SFTOptions",
        ),
        *_preference_algorithms(),
        AlgorithmSpec(
            name="distillation",
            summary="On-policy distillation from one or several teachers (arXiv 2306.13649)",
            factory="chatlearn_algorithms.distillation:Distillation",
            options="chatlearn_algorithms.distillation_options:DistillationOptions",
        ),
    ]


def _preference_algorithms() -> Iterable[AlgorithmSpec]:
    """Return the algorithms that learn from good and bad completions."""
    summaries = {
        "dpo:DPO": "Direct preference optimization (arXiv 2305.18290)",
        "ipo:IPO": "Identity preference optimization (arXiv 2310.12036)",
        "simpo:SimPO": "Simple preference optimization, without a reference (arXiv 2405.14734)",
        "orpo:ORPO": "Odds ratio preference optimization, without a reference (arXiv 2403.07691)",
        "kto:KTO": "Kahneman-Tversky optimization on single labelled completions (arXiv 2402.01306)",
        "reward_model:RewardModel": "Reward-model training by Bradley-Terry, with margins (arXiv 2203.02155)",
        "online_dpo:OnlineDPO": "DPO or IPO on pairs that the policy samples (arXiv 2402.04792)",
        "rejection_sampling:RejectionSampling": "Imitates the best of n completions (arXiv 2304.06767)",
    }
    return [
        AlgorithmSpec(
            name=factory.partition(":")[0],
            summary=summary,
            factory=f"chatlearn_algorithms.{factory}",
            options=f"chatlearn_algorithms.preference_options:{factory.partition(':')[2]}Options",
        )
        for factory, summary in summaries.items()
    ]


@hookimpl
def chatlearn_example_kinds() -> Iterable[ExampleKindSpec]:
    """Register kinds of examples that contain completions."""
    return [
        ExampleKindSpec(
            name="demonstrations",
            summary="Completions to imitate.",
            factory="chatlearn_algorithms.example_kinds:Demonstrations",
        ),
        ExampleKindSpec(
            name="preferences",
            summary="Completions of one prompt, ranked or labelled.",
            factory="chatlearn_algorithms.example_kinds:Preferences",
        ),
        ExampleKindSpec(
            name="ranked_completions",
            summary="Completions of one prompt, some better than others.",
            factory="chatlearn_algorithms.preference_kinds:RankedCompletions",
        ),
        ExampleKindSpec(
            name="labelled_completions",
            summary="Completions that are good or bad; in a pair, the chosen one is good and the rejected one bad.",
            factory="chatlearn_algorithms.preference_kinds:LabelledCompletions",
        ),
    ]


@hookimpl
def chatlearn_flow_methods() -> Iterable[FlowMethodSpec]:
    """Register the mismatched logprobs that KTO needs, and the logprobs of teachers with another vocabulary."""
    return [
        FlowMethodSpec(
            name="trainer.mismatched_logprobs",
            summary="Summed logprobs of each prompt with a completion of another prompt (KTO, arXiv 2402.01306).",
            arguments="chatlearn_algorithms.call_arguments:MismatchedArguments",
            outputs=("logprobs",),
            other_samples="chatlearn_algorithms.mismatched:mismatched",
            adds=("{name}_mismatched_logprobs",),
            granularity="batch",
            action="chatlearn_algorithms.mismatched:mismatched_logprobs",
        ),
        FlowMethodSpec(
            name="trainer.text_logprobs",
            summary="Logprobs of the completions' text under a model with its own tokenizer and chat template.",
            arguments="chatlearn_algorithms.call_arguments:TextLogprobsArguments",
            adds=("{name}_text_logprobs", "{name}_text_spans"),
            granularity="batch",
            changes=True,
            action="chatlearn_algorithms.shared_text:text_logprobs",
            by_text=True,
        ),
    ]


_POLICY_GRADIENTS = {
    "grpo": ("grpo:GRPO", "grpo_options:GRPOOptions", "Group relative policy optimization (arXiv 2402.03300)"),
    "dr_grpo": (
        "grpo:GRPO",
        "grpo_options:DrGRPOOptions",
        "GRPO without its length and difficulty biases (arXiv 2503.20783)",
    ),
    "dapo": (
        "dapo:DAPO",
        "grpo_options:DAPOOptions",
        "GRPO with clip-higher, dynamic sampling and overlong shaping (arXiv 2503.14476)",
    ),
    "gspo": ("gspo:GSPO", "grpo_options:GSPOOptions", "GRPO with ratios of whole sequences (arXiv 2507.18071)"),
    "cispo": ("cispo:CISPO", "grpo_options:CISPOOptions", "Clipped importance weights (arXiv 2506.13585)"),
    "gdpo": ("gdpo:GDPO", "grpo_options:GDPOOptions", "Several rewards, each normalised separately (arXiv 2601.05242)"),
    "rloo": ("rloo:RLOO", "reinforce_options:RLOOOptions", "REINFORCE leave-one-out (arXiv 2402.14740)"),
    "reinforce_pp": (
        "reinforce_pp:ReinforcePP",
        "reinforce_options:ReinforcePPOptions",
        "Batch-normalised token returns without a critic (arXiv 2501.03262)",
    ),
    "reinforce_pp_baseline": (
        "reinforce_pp:ReinforcePPBaseline",
        "reinforce_options:ReinforcePPBaselineOptions",
        "REINFORCE++ with the group's mean as baseline (arXiv 2501.03262)",
    ),
    "maxrl": (
        "maxrl:MaxRL",
        "reinforce_options:MaxRLOptions",
        "Maximum-likelihood reinforcement learning (arXiv 2602.02710)",
    ),
    "ppo": ("ppo:PPO", "ppo_options:PPOOptions", "Proximal policy optimization with a critic (arXiv 1707.06347)"),
    "decoupled_ppo": (
        "ppo:PPO",
        "ppo_options:DecoupledPPOOptions",
        "PPO with separate proximal and sampling policies (arXiv 2110.00641)",
    ),
}
"""Name -> factory, options, summary."""


def _policy_gradients() -> Iterable[AlgorithmSpec]:
    for name, (factory, options, summary) in _POLICY_GRADIENTS.items():
        yield AlgorithmSpec(
            name=name,
            summary=summary,
            factory=f"chatlearn_algorithms.{factory}",
            options=f"chatlearn_algorithms.{options}",
        )


@hookimpl
def chatlearn_sample_filters() -> Iterable[SampleFilterSpec]:
    """Register filters of scored samples."""
    return [
        SampleFilterSpec(
            name="truncated",
            summary="Excludes completions that the length limit cut off (arXiv 2503.14476)",
            factory="chatlearn_algorithms.truncated:Truncated",
            options="chatlearn_algorithms.decision_options:TruncatedOptions",
        )
    ]


@hookimpl
def chatlearn_schedules() -> Iterable[ScheduleSpec]:
    """Register schedules of settings."""
    return [
        ScheduleSpec(
            name="linear",
            summary="Linear from one value to another",
            factory="chatlearn_algorithms.linear:Linear",
            options="chatlearn_algorithms.decision_options:LinearOptions",
        )
    ]


@hookimpl
def chatlearn_step_policies() -> Iterable[StepPolicySpec]:
    """Register step policies."""
    return [
        StepPolicySpec(
            name="early_stop",
            summary="Ends a run whose metric has reached a goal, or no longer improves",
            factory="chatlearn_algorithms.early_stop:EarlyStop",
            options="chatlearn_algorithms.decision_options:EarlyStopOptions",
        )
    ]


@hookimpl
def chatlearn_aggregations() -> Iterable[AggregationSpec]:
    """Register aggregations of token losses."""
    module, options = "chatlearn_algorithms.aggregations", "chatlearn_algorithms.aggregation_options"
    summaries = {
        "token_mean": "Every token weighs the same (DAPO, arXiv 2503.14476)",
        "seq_mean_token_mean": "The mean over sequences of a sequence's mean (GRPO, arXiv 2402.03300)",
        "seq_mean_token_sum": "The mean over sequences of a sequence's sum",
        "seq_mean_token_sum_norm": "The mean over sequences of a sequence's sum, divided by a constant length"
        " (Dr.GRPO, arXiv 2503.20783)",
        "prompt_mean": "The mean over prompts of the mean over the tokens of all completions",
    }
    return [
        AggregationSpec(
            name=name,
            summary=summary,
            function=f"{module}:{name}",
            options=f"{options}:{'ConstantLength' if name.endswith('_norm') else 'NoAggregation'}Options",
            loss_unit="group" if name == "prompt_mean" else "sequence",
        )
        for name, summary in summaries.items()
    ]
