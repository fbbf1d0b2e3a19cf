"""The core's own registrations, through the same hooks as every plugin's."""

from __future__ import annotations

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import ExampleKindSpec, FlowMethodSpec, OutputSpec

_ARGUMENTS = "chatlearn_core.flow.arguments"
_CALLS = "chatlearn_core.executor.flow_calls"


@hookimpl
def chatlearn_example_kinds() -> list[ExampleKindSpec]:
    """The kind of examples that every algorithm with a generator can take."""
    factory = "chatlearn_core.data.prompts:Prompts"
    return [ExampleKindSpec(name="prompts", summary="Prompts to complete.", factory=factory, has_samples=False)]


@hookimpl
def chatlearn_outputs() -> list[OutputSpec]:
    """The outputs that the core's flow methods and losses request from trainers."""
    k_likeliest = "The k most likely tokens at each position, most likely first."
    given_ids = "Logprobs, at each position, of the token ids in the token data named by 'ids'."
    truncated = "Logprob of each token among the ids in the token data named by 'kept', -1 after the last id."
    entropy = "Entropy in nats of the distribution that each token was sampled from."
    score = "The reward head's output at the last token."
    return [
        OutputSpec(name="logprobs", summary="Logprob of each token.", head="lm", at_most=0.0),
        OutputSpec(name="truncated_logprobs", summary=truncated, head="lm", from_batch=("kept",), at_most=0.0),
        OutputSpec(name="entropy", summary=entropy, head="lm", at_least=0.0),
        OutputSpec(name="topk_ids", summary=k_likeliest, shape=("k",), dtype="int", head="lm", at_least=0.0),
        OutputSpec(name="topk_logprobs", summary="Logprobs of topk_ids.", shape=("k",), head="lm", at_most=0.0),
        OutputSpec(name="logprobs_at", summary=given_ids, shape=("ids",), head="lm", from_batch=("ids",), at_most=0.0),
        OutputSpec(name="values", summary="Value of the state in which each token was chosen.", head="value"),
        OutputSpec(name="scores", summary=score, per="sequence", head="reward"),
        OutputSpec(name="hidden_states", summary="Last hidden state of each token.", shape=(None,), masked=False),
    ]


@hookimpl
def chatlearn_flow_methods() -> list[FlowMethodSpec]:
    """The calls available to every flow."""
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
            summary="Rewards of the samples.",
            arguments=f"{_ARGUMENTS}:NoArguments",
            adds=("reward",),
            action=f"{_CALLS}:judge",
        ),
        _computed("logprobs", "Logprobs of the tokens.", "KeptComputeArguments"),
        _computed(
            "truncated_logprobs",
            "Logprobs of the tokens among the ids that they were sampled from.",
            "TruncatedLogprobsArguments",
        ),
        _computed(
            "entropy", "Entropies of the distributions that the tokens were sampled from.", "KeptComputeArguments"
        ),
        _computed(
            "topk",
            "Ids and logprobs of the k most likely tokens at each position.",
            "TopKArguments",
            outputs=("topk_ids", "topk_logprobs"),
        ),
        _computed("logprobs_at", "Logprobs of given tokens at each position.", "LogprobsAtArguments"),
        _computed("values", "Values of the states in which the tokens were chosen.", "NoArguments"),
        _computed("scores", "Scores of whole sequences.", "NoArguments"),
    ]


def _computed(method: str, summary: str, arguments: str, outputs: tuple[str, ...] = ()) -> FlowMethodSpec:
    """A trainer's computation without gradients; by default of the output with the method's name."""
    return FlowMethodSpec(
        name=f"trainer.{method}",
        summary=summary,
        arguments=f"{_ARGUMENTS}:{arguments}",
        outputs=outputs or (method,),
        granularity="batch",
    )
