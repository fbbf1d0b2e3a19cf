"""The core's own registrations, through the same hooks as every plugin's."""

from __future__ import annotations

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import (
    ExampleKindSpec,
    FlowMethodSpec,
    OutputSpec,
    SamplerSpec,
)

_ARGUMENTS = "chatlearn_core.flow.arguments"
_CALLS = "chatlearn_core.executor.flow_calls"


@hookimpl
def chatlearn_samplers() -> list[SamplerSpec]:
    """The default sampler."""
    return [
        SamplerSpec(
            name="shuffled",
            summary="Every dataset epoch by epoch, mixed by weight, each epoch in a new random order.",
            factory="chatlearn_core.data.sampler:shuffled_sampler",
            options="chatlearn_core.plugins.sampler_options:ShuffledOptions",
        )
    ]


@hookimpl
def chatlearn_example_kinds() -> list[ExampleKindSpec]:
    """The kinds of examples that algorithms can take."""
    kinds = "chatlearn_core.data.builtin_kinds:"
    return [
        ExampleKindSpec(name="prompts", summary="Prompts to complete.", factory=f"{kinds}Prompts", has_samples=False),
        ExampleKindSpec(name="demonstrations", summary="Completions to imitate.", factory=f"{kinds}Demonstrations"),
        ExampleKindSpec(
            name="preferences", summary="Completions of one prompt, ranked or labelled.", factory=f"{kinds}Preferences"
        ),
    ]


@hookimpl
def chatlearn_outputs() -> list[OutputSpec]:
    """The outputs that the core's flow methods and losses request from trainers."""
    return [
        OutputSpec(name="logprobs", summary="Logprob of each token.", head="lm", at_most=0.0),
        OutputSpec(
            name="entropy",
            summary="Entropy, nats, of the distribution behind each token.",
            head="lm",
            at_least=0.0,
        ),
        OutputSpec(
            name="topk_ids",
            summary="The k most likely tokens at each position, most likely first.",
            shape=("k",),
            dtype="int",
            head="lm",
            at_least=0.0,
        ),
        OutputSpec(
            name="topk_logprobs",
            summary="Logprobs of topk_ids.",
            shape=("k",),
            head="lm",
            at_most=0.0,
        ),
        OutputSpec(
            name="logprobs_at",
            summary="Logprobs, at each position, of the token ids in the token data named by 'ids'.",
            shape=("ids",),
            head="lm",
            from_batch=("ids",),
            at_most=0.0,
        ),
        OutputSpec(
            name="values",
            summary="Value of the state in which each token was chosen.",
            head="value",
        ),
        OutputSpec(name="scores", summary="The reward head's output at the last token.", per="sequence", head="reward"),
        OutputSpec(
            name="hidden_states",
            summary="Last hidden state of each token.",
            shape=(None,),
            masked=False,
        ),
    ]


@hookimpl
def chatlearn_flow_methods() -> list[FlowMethodSpec]:
    """The calls available to every flow."""
    compute = f"{_ARGUMENTS}:KeptComputeArguments"
    return [
        FlowMethodSpec(
            name="generator.generate",
            summary="Sample completions of the prompts.",
            arguments=f"{_ARGUMENTS}:GenerateArguments",
            takes="examples",
            action=f"{_CALLS}:generate",
        ),
        FlowMethodSpec(
            name="environment.rollout",
            summary="Make rollouts of the prompts: turns of the policy and responses of an environment.",
            arguments=f"{_ARGUMENTS}:SamplingArguments",
            takes="examples",
            granularity="batch",
            action="chatlearn_core.executor.environment_calls:rollout",
        ),
        FlowMethodSpec(
            name="generator.extend",
            summary="Continue samples with a further turn.",
            arguments=f"{_ARGUMENTS}:SamplingArguments",
            granularity="batch",  # what an engine batches must not depend on when a reward or a function was done
            changes=True,
            action=f"{_CALLS}:extend",
        ),
        FlowMethodSpec(
            name="generator.score",
            summary="Logprobs of the samples' tokens.",
            arguments=f"{_ARGUMENTS}:ComputeArguments",
            granularity="batch",
            adds=("{name}_score_logprobs",),
            action=f"{_CALLS}:score_tokens",
        ),
        FlowMethodSpec(
            name="function.apply",
            summary="Call a user's function on samples.",
            arguments=f"{_ARGUMENTS}:AnyArguments",
            granularity="group",
            changes=True,
            action=f"{_CALLS}:apply_function",
        ),
        FlowMethodSpec(
            name="reward.score",
            summary="Judge what was sampled.",
            arguments=f"{_ARGUMENTS}:NoArguments",
            adds=("reward",),
            action=f"{_CALLS}:judge",
        ),
        FlowMethodSpec(
            name="trainer.logprobs",
            summary="Logprobs of the tokens.",
            arguments=compute,
            outputs=("logprobs",),
            granularity="batch",
        ),
        FlowMethodSpec(
            name="trainer.entropy",
            summary="Entropies of the distributions behind the tokens.",
            arguments=compute,
            outputs=("entropy",),
            granularity="batch",
        ),
        FlowMethodSpec(
            name="trainer.topk",
            summary="Ids and logprobs of the k most likely tokens at each position.",
            arguments=f"{_ARGUMENTS}:TopKArguments",
            outputs=("topk_ids", "topk_logprobs"),
            granularity="batch",
        ),
        FlowMethodSpec(
            name="trainer.logprobs_at",
            summary="Logprobs of given tokens at each position.",
            arguments=f"{_ARGUMENTS}:LogprobsAtArguments",
            outputs=("logprobs_at",),
            granularity="batch",
        ),
        FlowMethodSpec(
            name="trainer.values",
            summary="Values of the states in which the tokens were chosen.",
            arguments=f"{_ARGUMENTS}:NoArguments",
            outputs=("values",),
            granularity="batch",
        ),
        FlowMethodSpec(
            name="trainer.scores",
            summary="Scores of whole sequences.",
            arguments=f"{_ARGUMENTS}:NoArguments",
            outputs=("scores",),
            granularity="batch",
        ),
    ]
