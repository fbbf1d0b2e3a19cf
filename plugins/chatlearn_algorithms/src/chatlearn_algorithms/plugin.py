"""Registers the algorithms of this distribution."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import (
    AggregationSpec,
    AlgorithmSpec,
    SampleFilterSpec,
    ScheduleSpec,
    StepPolicySpec,
)


@hookimpl
def chatlearn_algorithms() -> Iterable[AlgorithmSpec]:
    """GRPO, Dr.GRPO and supervised fine-tuning."""
    return [
        AlgorithmSpec(
            name="grpo",
            summary="Group relative policy optimization (arXiv 2402.03300)",
            factory="chatlearn_algorithms.grpo:GRPO",
            options="chatlearn_algorithms.grpo_options:GRPOOptions",
        ),
        AlgorithmSpec(
            name="dr_grpo",
            summary="GRPO without its length and difficulty biases (arXiv 2503.20783)",
            factory="chatlearn_algorithms.grpo:GRPO",
            options="chatlearn_algorithms.grpo_options:DrGRPOOptions",
        ),
        AlgorithmSpec(
            name="sft",
            summary="Supervised fine-tuning on demonstrations",
            factory="chatlearn_algorithms.sft:SFT",
            options="chatlearn_algorithms.sft_options:SFTOptions",
        ),
    ]


@hookimpl
def chatlearn_sample_filters() -> Iterable[SampleFilterSpec]:
    """Filters of scored samples."""
    return [
        SampleFilterSpec(
            name="truncated",
            summary="Leaves out completions that the length limit cut off (arXiv 2503.14476)",
            factory="chatlearn_algorithms.truncated:Truncated",
            options="chatlearn_algorithms.decision_options:TruncatedOptions",
        )
    ]


@hookimpl
def chatlearn_schedules() -> Iterable[ScheduleSpec]:
    """Schedules of settings."""
    return [
        ScheduleSpec(
            name="linear",
            summary="From one value to another along a straight line",
            factory="chatlearn_algorithms.linear:Linear",
            options="chatlearn_algorithms.decision_options:LinearOptions",
        )
    ]


@hookimpl
def chatlearn_step_policies() -> Iterable[StepPolicySpec]:
    """What follows from a step."""
    return [
        StepPolicySpec(
            name="early_stop",
            summary="Ends a run whose metric has reached a goal, or does not improve any more",
            factory="chatlearn_algorithms.early_stop:EarlyStop",
            options="chatlearn_algorithms.decision_options:EarlyStopOptions",
        )
    ]


@hookimpl
def chatlearn_aggregations() -> Iterable[AggregationSpec]:
    """How token losses become one number."""
    module, options = "chatlearn_algorithms.aggregations", "chatlearn_algorithms.aggregation_options"
    summaries = {
        "token_mean": "Every token weighs the same (DAPO, arXiv 2503.14476)",
        "seq_mean_token_mean": "The mean over sequences of each one's mean (GRPO, arXiv 2402.03300)",
        "seq_mean_token_sum": "The mean over sequences of each one's sum",
        "seq_mean_token_sum_norm": "The same over a constant length (Dr.GRPO, arXiv 2503.20783)",
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
