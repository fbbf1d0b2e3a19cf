"""What this distribution registers; imports nothing heavy."""

from collections.abc import Iterable
from dataclasses import replace

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import (
    AlgorithmSpec,
    EnvironmentSpec,
    FlowMethodSpec,
    OutputSpec,
    RewardSpec,
    RuntimeSpec,
    SampleFilterSpec,
    SamplerSpec,
    ScheduleSpec,
    StepPolicySpec,
    TrainerSpec,
)
from chatlearn_fsdp.plugin import chatlearn_trainers as fsdp_trainers

OPTIONS = "probe_package.options:"


@hookimpl
def chatlearn_algorithms() -> Iterable[AlgorithmSpec]:
    return [
        AlgorithmSpec(
            name="appraised",
            summary="A student that learns from what an appraiser of states did not expect.",
            factory="probe_package.appraised:Appraised",
            options=OPTIONS + "AppraisedOptions",
            roles=(("pen", "generator"), ("taste", "reward"), ("student", "trainer"), ("appraiser", "trainer")),
        ),
        AlgorithmSpec(
            name="pairwise",
            summary="Prefers the better of two completions (DPO, arXiv 2305.18290).",
            factory="probe_package.pairwise:Pairwise",
            options=OPTIONS + "PairwiseOptions",
            roles=(("pupil", "trainer"), ("anchor", "trainer")),
        ),
        AlgorithmSpec(
            name="rounds",
            summary="GRPO on conversations in which a remark follows each answer but the last.",
            factory="probe_package.rounds:Rounds",
            options=OPTIONS + "RoundsOptions",
        ),
        AlgorithmSpec(
            name="refilled",
            summary="GRPO that draws further prompts, several at a time, until a step has enough.",
            factory="probe_package.refilled:Refilled",
            options=OPTIONS + "RefilledOptions",
        ),
    ]


@hookimpl
def chatlearn_environments() -> Iterable[EnvironmentSpec]:
    return [
        EnvironmentSpec(
            name="dictation",
            summary="Lets the policy write, tells it what to write instead, and lets it write again.",
            factory="probe_package.dictation:Dictation",
            options=OPTIONS + "DictationOptions",
            uses=("pen",),
        )
    ]


@hookimpl
def chatlearn_rewards() -> Iterable[RewardSpec]:
    return [
        RewardSpec(
            name="vowels",
            summary="The share of vowels.",
            factory="probe_package.vowels:Vowels",
            options=OPTIONS + "NoOptions",
        )
    ]


@hookimpl
def chatlearn_samplers() -> Iterable[SamplerSpec]:
    return [
        SamplerSpec(
            name="weakest",
            summary="Draws what the policy was worst at.",
            factory="probe_package.decisions:Weakest",
            options=OPTIONS + "NoOptions",
        )
    ]


@hookimpl
def chatlearn_sample_filters() -> Iterable[SampleFilterSpec]:
    return [
        SampleFilterSpec(
            name="thinned",
            summary="Leaves out every so many-th sample of the run.",
            factory="probe_package.decisions:Thinned",
            options=OPTIONS + "ThinnedOptions",
        )
    ]


@hookimpl
def chatlearn_schedules() -> Iterable[ScheduleSpec]:
    return [
        ScheduleSpec(
            name="halving",
            summary="Halves a value every so many steps.",
            factory="probe_package.decisions:Halving",
            options=OPTIONS + "HalvingOptions",
        )
    ]


@hookimpl
def chatlearn_step_policies() -> Iterable[StepPolicySpec]:
    return [
        StepPolicySpec(
            name="token_budget",
            summary="Ends a run that has trained on so many tokens.",
            factory="probe_package.decisions:TokenBudget",
            options=OPTIONS + "TokenBudgetOptions",
        )
    ]


@hookimpl
def chatlearn_outputs() -> Iterable[OutputSpec]:
    return [OutputSpec(name="margin", summary="Nats between the two likeliest tokens.", head="lm", at_least=0.0)]


@hookimpl
def chatlearn_flow_methods() -> Iterable[FlowMethodSpec]:
    return [
        FlowMethodSpec(
            name="trainer.margin",
            summary="How much likelier the likeliest token is than the next, in each token's place.",
            arguments="chatlearn_core.flow.arguments:ComputeArguments",
            outputs=("margin",),
            granularity="batch",
        )
    ]


@hookimpl
def chatlearn_trainers() -> Iterable[TrainerSpec]:
    [fsdp] = fsdp_trainers()
    return [
        replace(
            fsdp,
            name="margin",
            summary="fsdp with the output margin.",
            factory="probe_package.margin_trainer:MarginTrainer",
            options=OPTIONS + "MarginTrainerOptions",
            outputs=fsdp.outputs | {"margin"},
            layout_options=(*fsdp.layout_options, "record"),
        )
    ]


@hookimpl
def chatlearn_runtimes() -> Iterable[RuntimeSpec]:
    return [
        RuntimeSpec(
            name="processes",
            summary="Every worker a process of this machine.",
            factory="acme_plugin.runtime:AcmeRuntime",
            options="acme_plugin.options:AcmeOptions",
            placement="host",
        )
    ]
