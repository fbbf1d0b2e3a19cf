"""From a checked configuration to everything a run needs: data, algorithm, graph, plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from chatlearn_core.config.load import LoadedConfig
from chatlearn_core.config.models import RunConfig, SamplingConfig
from chatlearn_core.data import ExampleSet, PromptRenderer, Tokenizer, build_dataset
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.executor.evaluator import evaluation_flow, evaluation_roles
from chatlearn_core.executor.flow_checks import check_devices, check_outputs, check_partial_rollouts, check_roles
from chatlearn_core.executor.ground_truths import ground_truth_check
from chatlearn_core.executor.logprob_bases import DeclaredBases
from chatlearn_core.executor.planning import model_source, plan_run, with_vocab_sizes
from chatlearn_core.executor.policy import policy_of
from chatlearn_core.executor.role_models import asked_for_by, check_role_models
from chatlearn_core.flow import Graph, trace
from chatlearn_core.plugins.compatibility import bases_of
from chatlearn_core.plugins.records import (
    AlgorithmSpec,
    GeneratorSpec,
    ModelFamilySpec,
)
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.protocols import Algorithm, AlgorithmContext
from chatlearn_core.protocols.model_family import ModelFamily
from chatlearn_core.runtime.plan import RunPlan
from chatlearn_core.types import LogprobBasis, SamplingParams


@dataclass(slots=True, frozen=True)
class Assembly:
    """A run that has been checked as far as it can be without starting an engine."""

    loaded: LoadedConfig
    registry: PluginRegistry
    algorithm: Algorithm
    policy: str | None
    """The role whose weights the generators serve; None if no language model learns."""
    graph: Graph
    evaluation: Graph | None
    """None if the configuration evaluates nothing."""
    plan: RunPlan
    train_set: ExampleSet
    eval_set: ExampleSet | None
    sampling: SamplingParams
    eval_sampling: SamplingParams
    group_rewards: frozenset[str]

    @property
    def config(self) -> RunConfig:
        return self.loaded.config


@dataclass(slots=True, frozen=True)
class FlowAssembly:
    """What a configuration makes without a look at models and data."""

    algorithm: Algorithm
    policy: str | None
    """The role whose weights the generators serve; None if no language model learns."""
    graph: Graph
    evaluation: Graph | None
    plan: RunPlan


def assemble_flow(loaded: LoadedConfig, registry: PluginRegistry) -> FlowAssembly:
    """Build the algorithm, trace its flow, and plan the roles: all that ``chatlearn config validate`` can check.

    Raises:
        ConfigError, FlowError, PluginError: what does not fit, and where it was asked for.
    """
    config = loaded.config
    algorithm = build_algorithm(loaded, registry)
    graph = trace_flow(loaded, algorithm)
    losses = algorithm.losses()
    evaluation = None
    if config.data.eval:
        evaluation = trace(evaluation_flow(*evaluation_roles(config, graph)), _kinds(config), name="evaluation")
    check_roles(config, graph, losses, evaluation)
    policy = policy_of(algorithm, losses, config)
    check_outputs(loaded, graph, losses)
    check_partial_rollouts(config, graph)
    check_devices(config)
    plan = plan_run(loaded, registry, graph, evaluation, losses, policy)
    return FlowAssembly(algorithm, policy, graph, evaluation, plan)


def assemble(loaded: LoadedConfig, registry: PluginRegistry) -> Assembly:
    """Build what a run needs and check that the pieces fit; starts no engine and touches no device.

    Raises:
        ConfigError, FlowError, ModelError, DataError, PluginError: what does not fit, and where it was asked for.
    """
    config = loaded.config
    flow = assemble_flow(loaded, registry)
    family = _model_family(registry)
    source = model_source(config.model, config.model)
    with asked_for_by(f"{loaded.source}, model.path"):
        facts = family.facts(source)
    sampling = sampling_params(config.sampling)
    eval_sampling = sampling_params(config.eval.sampling) if config.eval.sampling else greedy(sampling)
    evaluates = flow.evaluation is not None
    max_length = min(config.model.max_length or facts.max_length, facts.max_length)
    room = max(sampling.max_tokens, eval_sampling.max_tokens) if flow.algorithm.input == "prompts" or evaluates else 1
    if room >= max_length:
        raise ConfigError(
            f"{loaded.source}: sampling.max_tokens is {room}, but the longest sequence of the model is {max_length} "
            "tokens (model.max_length), which leaves no room for a prompt. Lower sampling.max_tokens"
        )
    room_for_prompt = config.data.max_prompt_tokens or max_length - room
    if room_for_prompt + room > max_length:
        raise ConfigError(
            f"{loaded.source}: data.max_prompt_tokens is {room_for_prompt} and sampling.max_tokens {room}, together "
            f"more than the longest sequence of the model, {max_length} tokens (model.max_length). Lower one of the two"
        )
    with asked_for_by(f"{loaded.source}, model.{'tokenizer' if config.model.tokenizer else 'path'}"):
        tokenizer = family.load_tokenizer(source)
    plan = with_vocab_sizes(flow.plan, check_role_models(loaded, family, flow.plan.roles, tokenizer, facts.vocab_size))
    stop_token_ids = _ends_of_turns(config, tokenizer)
    sampling = replace(sampling, stop_token_ids=stop_token_ids)
    eval_sampling = replace(eval_sampling, stop_token_ids=stop_token_ids)
    train_set = build_dataset(
        config.data,
        tokenizer,
        registry,
        input=flow.algorithm.input,
        max_prompt_tokens=room_for_prompt,
        max_length=max_length,
        split="train",
        check=ground_truth_check(flow.graph, flow.plan),
    )
    eval_set = None
    if flow.evaluation is not None:
        eval_set = build_dataset(
            config.data,
            tokenizer,
            registry,
            input="prompts",
            max_prompt_tokens=room_for_prompt,
            max_length=max_length,
            split="eval",
            check=ground_truth_check(flow.evaluation, flow.plan),
        )
    return Assembly(
        loaded=loaded,
        registry=registry,
        algorithm=flow.algorithm,
        policy=flow.policy,
        graph=flow.graph,
        evaluation=flow.evaluation,
        plan=plan,
        train_set=train_set,
        eval_set=eval_set,
        sampling=sampling,
        eval_sampling=eval_sampling,
        group_rewards=_group_rewards(loaded),
    )


def _ends_of_turns(config: RunConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The token by which the chat template ends a turn, where it is not the tokenizer's end of sequence, which ends a
    completion anyway.
    """
    end = PromptRenderer(tokenizer, config.data.apply_chat_template).end_of_turn_id
    return () if end is None or end == tokenizer.eos_token_id else (end,)


def sampling_params(config: SamplingConfig) -> SamplingParams:
    """The sampling section as the generator takes it."""
    return SamplingParams(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        stop=tuple(config.stop),
    )


def greedy(sampling: SamplingParams) -> SamplingParams:
    """The same lengths and stops, without chance."""
    return SamplingParams(max_tokens=sampling.max_tokens, temperature=0.0, stop=sampling.stop)


def _model_family(registry: PluginRegistry) -> ModelFamily:
    """The family for models that no plugin claims by ``model_type``."""
    general = [record for record in registry.records("model_family") if not record.model_types]
    if not general:
        raise ConfigError(
            "no installed plugin reads model directories (hook chatlearn_model_families); install chatlearn-hf"
        )
    record = registry.select("model_family", general[0].name, where="model")
    assert isinstance(record, ModelFamilySpec)
    family: ModelFamily = registry.load_factory(record)(registry.load_options(record)())
    return family


def build_algorithm(loaded: LoadedConfig, registry: PluginRegistry) -> Algorithm:
    """The algorithm that the configuration names, with its options."""
    sampling = sampling_params(loaded.config.sampling)
    generator, generator_basis = _other_basis(loaded, sampling)
    choice = loaded.plugin("algorithm")
    assert isinstance(choice.record, AlgorithmSpec)
    context = AlgorithmContext(
        basis=sampling.basis,
        max_completion_tokens=sampling.max_tokens,
        roles={name: role.kind for name, role in loaded.config.roles.items()},
        generator_basis=generator_basis,
        generator=generator,
    )
    algorithm: Algorithm = registry.load_factory(choice.record)(choice.options, context)
    return algorithm


def _other_basis(loaded: LoadedConfig, sampling: SamplingParams) -> tuple[str, LogprobBasis | None]:
    """The first generator whose logprobs are not of the distribution that is sampled from, and what they are of."""
    for name, role in loaded.config.roles.items():
        if role.kind == "generator":
            choice = loaded.plugin("roles", name)
            assert isinstance(choice.record, GeneratorSpec)
            declared = DeclaredBases(name, choice.record.name, bases_of(choice.record, choice.options))
            if declared.expected(sampling) != sampling.basis:
                return f"{choice.record.name} (role {name})", declared.expected(sampling)
    return "the generator", None


def trace_flow(loaded: LoadedConfig, algorithm: Algorithm) -> Graph:
    """The checked graph of an algorithm's flow over the configured roles."""
    config = loaded.config
    return trace(algorithm.flow, _kinds(config), name=config.algorithm.name, input_kind=algorithm.input)


def _kinds(config: RunConfig) -> dict[str, str]:
    return {name: role.kind for name, role in config.roles.items()}


def _group_rewards(loaded: LoadedConfig) -> frozenset[str]:
    """Reward roles with a part that judges whole groups."""
    return frozenset(
        name
        for name, role in loaded.config.roles.items()
        if role.kind == "reward"
        for key in (
            [("roles", name)] if not role.parts else [("roles", name, "parts", i) for i in range(len(role.parts))]
        )
        if getattr(loaded.plugin(*key).record, "unit", "sample") == "group"
    )
