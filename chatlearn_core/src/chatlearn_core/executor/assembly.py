"""Builds everything a run needs from a checked configuration: data, algorithm, graph, plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from chatlearn_core.config.load import LoadedConfig
from chatlearn_core.config.models import EvalSetConfig, RunConfig, SamplingConfig
from chatlearn_core.config.rules.evaluation import datasets_of_sets, with_defaults
from chatlearn_core.data import ExampleKind, ExampleSet, build_dataset
from chatlearn_core.data.pipeline import ExampleCheck
from chatlearn_core.data.report import DatasetReport
from chatlearn_core.data.tokenizer import Tokenizer
from chatlearn_core.exceptions import ConfigError, PluginError
from chatlearn_core.executor.aggregations import select_aggregation
from chatlearn_core.executor.cached_calls import check_cached, kept_roles, reading_graph
from chatlearn_core.executor.decisions import option_schedules
from chatlearn_core.executor.evaluation_metrics import Measures, usual_k
from chatlearn_core.executor.evaluator import evaluation_flow, evaluation_roles
from chatlearn_core.executor.flow_checks import (
    called_by_text,
    check_classifiers,
    check_devices,
    check_outputs,
    check_partial_rollouts,
    check_roles,
    check_scores,
    check_stages,
    check_uses,
)
from chatlearn_core.executor.ground_truths import ground_truth_check
from chatlearn_core.executor.learning_plan import LearningPlan, learning_plan
from chatlearn_core.executor.logprob_bases import DeclaredBases
from chatlearn_core.executor.planning import model_source, plan_run, with_vocab_sizes
from chatlearn_core.executor.policy import policy_of
from chatlearn_core.executor.role_models import asked_for_by, check_role_models
from chatlearn_core.executor.truncated_sampling import max_kept_ids
from chatlearn_core.flow import FlowVocabulary, Graph, trace
from chatlearn_core.plugins.compatibility import bases_of
from chatlearn_core.plugins.records import (
    AlgorithmSpec,
    ExampleKindSpec,
    GeneratorSpec,
)
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.protocols import Algorithm, AlgorithmContext
from chatlearn_core.protocols.prompt_renderer import PromptRenderer
from chatlearn_core.runtime.model_families import check_layouts, check_served_families, model_family
from chatlearn_core.runtime.plan import RolePlan, RunPlan
from chatlearn_core.types import LogprobBasis, SamplingParams


@dataclass(slots=True, frozen=True)
class EvaluationSet:
    """The examples of one evaluation set, and how they are evaluated."""

    name: str
    """Empty for datasets that no set names."""
    graph: Graph
    calls: Graph
    """``graph`` with every call made, for an evaluation without a run."""
    examples: ExampleSet
    sampling: SamplingParams
    samples_per_prompt: int
    measures: Measures


@dataclass(slots=True, frozen=True)
class Assembly:
    """A run that passed every check possible without starting an engine."""

    loaded: LoadedConfig
    registry: PluginRegistry
    algorithm: Algorithm
    learning: LearningPlan
    policy: str | None
    """The role whose weights the generators serve; None if no language model is trained."""
    kind: ExampleKind
    """Kind of the examples that the algorithm takes."""
    eval_kind: ExampleKind
    """Kind of the examples that evaluations take."""
    graph: Graph
    evaluations: tuple[EvaluationSet, ...]
    """Empty if the configuration has no evaluation."""
    plan: RunPlan
    train_set: ExampleSet
    max_length: int
    """Longest sequence, tokens."""
    sampling: SamplingParams
    group_rewards: frozenset[str]
    cached_roles: Mapping[str, RolePlan] = field(default_factory=dict)
    """Frozen roles that ``plan`` does without: ``graph`` and those of ``evaluations`` read their results from the
    disk (``executor/cached_calls.py``)."""
    eval_reports: tuple[DatasetReport, ...] = ()
    """Of the eval datasets."""
    mode: tuple[str, ...] = ()
    """What the plan of a run says about its rollout mode."""

    @property
    def config(self) -> RunConfig:
        return self.loaded.config

    @property
    def home(self) -> str:
        """The role whose workers compute the algorithm's advantages: the policy, else another trained role."""
        return self.policy or self.learning.learners[0]


@dataclass(slots=True, frozen=True)
class FlowAssembly:
    """The part of an assembly that needs neither models nor data."""

    algorithm: Algorithm
    learning: LearningPlan
    policy: str | None
    """The role whose weights the generators serve; None if no language model is trained."""
    kind: ExampleKind
    """Kind of the examples that the algorithm takes."""
    eval_kind: ExampleKind
    """Kind of the examples that evaluations take."""
    graph: Graph
    evaluations: Mapping[str, Graph]
    """By evaluation set; the name of the set of datasets that no set names is empty."""
    plan: RunPlan
    mode: tuple[str, ...]
    """What the plan of a run says about its rollout mode."""
    max_kept_ids: int
    """``SamplingParams.max_kept_ids`` of training rollouts."""


def assemble_flow(loaded: LoadedConfig, registry: PluginRegistry) -> FlowAssembly:
    """Build the algorithm, trace its flow, and plan the roles: everything that ``chatlearn config validate`` can check.

    Raises:
        ConfigError, FlowError, PluginError: settings or plugins do not fit; names the place in the configuration.
    """
    config = loaded.config
    algorithm = build_algorithm(loaded, registry)
    graph = trace_flow(loaded, algorithm, registry)
    learning = learning_plan(algorithm, config.train, config.algorithm.name)
    evaluations = {
        name: trace_evaluation(loaded, algorithm, graph, registry, name) for name in datasets_of_sets(config)
    }
    check_roles(config, graph, learning.losses, registry.outputs, evaluations.values())
    policy = policy_of(algorithm, learning.learners, config)
    check_outputs(loaded, registry, graph, learning.losses)
    for one in evaluations.values():
        check_outputs(loaded, registry, one, {})
    num_kept_ids = max_kept_ids(loaded, graph, learning.losses, sampling_params(config.sampling))
    check_scores(loaded, graph)
    check_classifiers(loaded, graph)
    called = {*learning.learners}.union(*(one.roles for one in (graph, *evaluations.values())))
    check_uses(loaded, registry, called)
    check_partial_rollouts(config, graph)
    follow = [name for name, role in config.roles.items() if role.refresh is not None]
    check_stages(config, graph, (*learning.losses, *follow))
    for one in (graph, *evaluations.values()):
        check_cached(config, one, (*learning.losses, *follow))
    check_devices(config)
    plan = plan_run(loaded, registry, graph, evaluations.values(), learning, policy)
    kind, eval_kind = (
        registry.load_factory(example_kind(loaded, registry, name))()
        for name in (algorithm.input, algorithm.evaluation_input or "prompts")
    )
    mode = _mode(loaded, registry, graph)
    return FlowAssembly(algorithm, learning, policy, kind, eval_kind, graph, evaluations, plan, mode, num_kept_ids)


def _mode(loaded: LoadedConfig, registry: PluginRegistry, graph: Graph) -> tuple[str, ...]:
    if (choice := loaded.chosen("rollout")) is None:
        return ("sync: rollouts and updates take turns",)
    return tuple(registry.load_factory(choice.record, "plan")(choice.options, loaded, graph))


def assemble(loaded: LoadedConfig, registry: PluginRegistry) -> Assembly:
    """Build what a run needs and check that the pieces fit; starts no engine and touches no device.

    Raises:
        ConfigError, FlowError, ModelError, DataError, PluginError: parts do not fit; names the configuration key.
    """
    config = loaded.config
    flow = assemble_flow(loaded, registry)
    source = model_source(config.model, config.model)
    with asked_for_by(f"{loaded.source}, model.path"):
        family = model_family(registry, source)
        facts = family.facts(source)
    sampling = sampling_params(config.sampling)
    settings = {name: with_defaults(config.eval, name) for name in flow.evaluations}
    eval_sampling = {
        name: sampling_params(one.sampling) if one.sampling else greedy(sampling) for name, one in settings.items()
    }
    evaluates = any(one.calls("generator.generate") for one in flow.evaluations.values())
    max_length = min(config.model.max_length or facts.max_length, facts.max_length)
    room = 1
    if evaluates or flow.graph.calls("generator.generate"):
        lengths = [sampling.max_tokens, flow.graph.sampled_tokens(sampling.max_tokens)]
        for name, one in flow.evaluations.items():
            held_out = eval_sampling[name].max_tokens
            lengths += [held_out, one.sampled_tokens(held_out)]
        room = max(lengths)
    if room >= max_length:
        raise ConfigError(
            f"{loaded.source}: {_sampled(room, sampling)}, but the longest sequence of the model is {max_length} "
            "tokens (model.max_length), which leaves no room for a prompt. Lower sampling.max_tokens"
        )
    room_for_prompt = config.data.max_prompt_tokens or max_length - room
    if room_for_prompt + room > max_length:
        raise ConfigError(
            f"{loaded.source}: data.max_prompt_tokens is {room_for_prompt} and {_sampled(room, sampling)}, together "
            f"more than the longest sequence of the model, {max_length} tokens (model.max_length). Lower one of the two"
        )
    with asked_for_by(f"{loaded.source}, model.{'tokenizer' if config.model.tokenizer else 'path'}"):
        tokenizer = family.load_tokenizer(source)
        renderer = family.renderer(
            tokenizer,
            apply_chat_template=config.data.apply_chat_template,
            system_prompt=config.data.system_prompt,
            control_tokens=config.data.control_tokens,
            max_tokens=max_length,
        )
    by_text = called_by_text(loaded, [flow.graph, *flow.evaluations.values()], flow.learning.learners)
    models = check_role_models(loaded, family, flow.plan.roles, tokenizer, facts, by_text)
    check_served_families(loaded, models)
    check_layouts(loaded, models)
    plan = with_vocab_sizes(flow.plan, {name: model.vocab_size for name, model in models.items()})
    stop_token_ids = _ends_of_turns(renderer, tokenizer)
    sampling = replace(sampling, stop_token_ids=stop_token_ids, max_kept_ids=flow.max_kept_ids)
    train_set = build_dataset(
        config.data,
        renderer,
        registry,
        kind=flow.kind,
        max_prompt_tokens=room_for_prompt,
        max_length=max_length,
        split="train",
        check=ground_truth_check(flow.graph, flow.plan),
    )
    indices = datasets_of_sets(config)
    eval_set = ExampleSet(())
    if indices:
        checks = {name: ground_truth_check(one, flow.plan) for name, one in flow.evaluations.items()}
        eval_set = build_dataset(
            config.data,
            renderer,
            registry,
            kind=flow.eval_kind,
            max_prompt_tokens=room_for_prompt,
            max_length=max_length,
            split="eval",
            check=[
                _first_problem([checks[name] for name, of_set in indices.items() if index in of_set])
                for index in range(len(config.data.eval))
            ],
        )
    snapshots = {name: model.snapshot for name, model in models.items()}
    cached_roles = kept_roles(plan, flow.graph, *flow.evaluations.values(), snapshots=snapshots)
    evaluations = tuple(
        EvaluationSet(
            name=name,
            graph=reading_graph(flow.evaluations[name], cached_roles),
            calls=flow.evaluations[name],
            examples=ExampleSet(tuple(eval_set.datasets[index] for index in of_set)),
            sampling=replace(eval_sampling[name], stop_token_ids=stop_token_ids),
            samples_per_prompt=settings[name].samples_per_prompt or 1,
            measures=_measures(config, settings[name]),
        )
        for name, of_set in indices.items()
    )
    _check_metric_names(loaded, evaluations)
    return Assembly(
        loaded=loaded,
        registry=registry,
        algorithm=flow.algorithm,
        learning=flow.learning,
        policy=flow.policy,
        kind=flow.kind,
        eval_kind=flow.eval_kind,
        graph=reading_graph(flow.graph, cached_roles),
        evaluations=evaluations,
        plan=replace(plan, roles={name: role for name, role in plan.roles.items() if name not in cached_roles}),
        train_set=train_set,
        max_length=max_length,
        sampling=sampling,
        group_rewards=_group_rewards(loaded),
        cached_roles=cached_roles,
        eval_reports=eval_set.reports,
        mode=flow.mode,
    )


def _first_problem(checks: Sequence[ExampleCheck]) -> ExampleCheck:
    """A check that returns the first problem that one of the checks finds."""
    return lambda prompt: next((problem for check in checks if (problem := check(prompt)) is not None), None)


def _measures(config: RunConfig, settings: EvalSetConfig) -> Measures:
    """What an evaluation set measures besides means."""
    return Measures(
        k=usual_k(settings.samples_per_prompt or 1) if settings.k is None else tuple(sorted(set(settings.k))),
        pass_threshold=settings.pass_threshold,
        confidence=config.eval.confidence,
        resamples=config.eval.resamples,
        seed=config.seed,
    )


def _check_metric_names(loaded: LoadedConfig, evaluations: Sequence[EvaluationSet]) -> None:
    """Raises ConfigError: the metrics of a set would have the names of those of a data source outside all sets."""
    names = {one.name for one in evaluations}
    for one in evaluations:
        sources = {example.prompt.data_source for example in one.examples} if not one.name else set()
        if taken := sorted(names & sources):
            raise ConfigError(
                f"{loaded.source}: eval.sets.{taken[0]} has the name of a data source of eval datasets that are in no "
                f"set, so that both would log eval/{taken[0]}. Rename the set"
            )


def _ends_of_turns(renderer: PromptRenderer, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The token with which the chat template ends a turn, unless it is the tokenizer's end-of-sequence token, which
    ends every completion.
    """
    end = renderer.end_of_turn_id
    return () if end is None or end == tokenizer.eos_token_id else (end,)


def _sampled(tokens: int, sampling: SamplingParams) -> str:
    """The settings that allow that many sampled tokens, for messages."""
    if tokens == sampling.max_tokens:
        return f"sampling.max_tokens is {tokens}"
    return f"sampling.max_tokens is {sampling.max_tokens} and the flow or the evaluation samples up to {tokens}"


def sampling_params(config: SamplingConfig) -> SamplingParams:
    """The sampling section as parameters for the generator."""
    return SamplingParams(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        stop=tuple(config.stop),
    )


def greedy(sampling: SamplingParams) -> SamplingParams:
    """The same lengths and stop conditions without randomness."""
    return SamplingParams(max_tokens=sampling.max_tokens, temperature=0.0, stop=sampling.stop)


ALGORITHM_MEMBERS = sorted(name for name in vars(Algorithm) if not name.startswith("_"))
"""Attributes of an algorithm that the core uses."""


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
        prompts_per_step=loaded.config.train.prompts_per_step,
        schedules=option_schedules(loaded, registry),
        aggregation=partial(select_aggregation, registry),
    )
    algorithm: Algorithm = registry.load_factory(choice.record)(choice.options, context)
    missing = [name for name in ALGORITHM_MEMBERS if not hasattr(algorithm, name)]
    if missing:
        raise PluginError(
            f"algorithm {choice.record.name!r} has no {', '.join(missing)}: its class {type(algorithm).__name__} must "
            "subclass chatlearn_core.protocols.Algorithm, which has defaults for optional methods"
        )
    unknown = sorted(context.schedules.keys() - algorithm.scheduled)
    if unknown:
        raise ConfigError(
            f"schedules: algorithm {choice.record.name!r} does not take a schedule of its option {unknown[0]!r}; "
            f"it takes {', '.join(sorted(algorithm.scheduled)) or 'none'}"
        )
    return algorithm


def _other_basis(loaded: LoadedConfig, sampling: SamplingParams) -> tuple[str, LogprobBasis | None]:
    """The first generator whose logprobs have another basis than the sampled distribution, and that basis."""
    judges = frozenset().union(*(role.used_roles for role in loaded.config.roles.values() if role.kind == "reward"))
    for name, role in loaded.config.roles.items():
        if role.kind == "generator" and not (name in judges and role.model is not None):
            choice = loaded.plugin("roles", name)
            assert isinstance(choice.record, GeneratorSpec)
            declared = DeclaredBases(name, choice.record.name, bases_of(choice.record, choice.options))
            if declared.expected(sampling) != sampling.basis:
                return f"{choice.record.name} (role {name})", declared.expected(sampling)
    return "the generator", None


def trace_flow(loaded: LoadedConfig, algorithm: Algorithm, registry: PluginRegistry) -> Graph:
    """The checked graph of an algorithm's flow over the configured roles."""
    config = loaded.config
    return trace(
        algorithm.flow,
        _kinds(config),
        name=config.algorithm.name,
        given=_given(example_kind(loaded, registry, algorithm.input)),
        vocabulary=FlowVocabulary.of(registry),
        uses=_uses(config),
    )


def trace_evaluation(
    loaded: LoadedConfig, algorithm: Algorithm, graph: Graph, registry: PluginRegistry, evaluation_set: str = ""
) -> Graph:
    """The checked graph of an evaluation: the algorithm's own, or prompts sampled and scored.

    Raises:
        ConfigError: the set has a reward, and the algorithm's own evaluation scores nothing with it.
    """
    config, given = loaded.config, None
    reward = config.eval.sets[evaluation_set].reward if evaluation_set else None
    if algorithm.evaluation_input is None:
        flow = evaluation_flow(evaluation_roles(config, graph, reward))
    elif reward is not None:
        raise ConfigError(
            f"{loaded.source}: eval.sets.{evaluation_set}.reward is {reward!r}, but algorithm "
            f"{config.algorithm.name!r} evaluates {algorithm.evaluation_input} by its own metrics and samples nothing "
            "that a reward could score. Remove reward"
        )
    else:
        flow, given = algorithm.evaluation, _given(example_kind(loaded, registry, algorithm.evaluation_input))
    return trace(
        flow,
        _kinds(config),
        name="evaluation",
        given=given,
        vocabulary=FlowVocabulary.of(registry),
        uses=_uses(config),
    )


def example_kind(loaded: LoadedConfig, registry: PluginRegistry, name: str) -> ExampleKindSpec:
    """The record of the kind of examples that the algorithm takes."""
    return registry.select(
        "example_kind", name, f"{loaded.source}, input of algorithm {loaded.config.algorithm.name!r}"
    )


def _given(kind: ExampleKindSpec) -> str | None:
    """The name of the kind if its examples bring samples, else None."""
    return kind.name if kind.has_samples else None


def _kinds(config: RunConfig) -> dict[str, str]:
    return {name: role.kind for name, role in config.roles.items()}


def _uses(config: RunConfig) -> dict[str, frozenset[str]]:
    return {name: role.used_roles for name, role in config.roles.items()}


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
