"""From a checked configuration to everything a run needs: data, algorithm, graph, plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from chatlearn_core.config.choices import SelectedPlugin
from chatlearn_core.config.load import LoadedConfig
from chatlearn_core.config.models import ModelConfig, RewardPart, RoleConfig, RunConfig, SamplingConfig
from chatlearn_core.data import ExampleSet, build_dataset
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.executor.evaluator import evaluation_flow
from chatlearn_core.flow import Graph, trace
from chatlearn_core.flow.graph import METHODS
from chatlearn_core.plugins.compatibility import choose_transport, placement_of, shared_channel
from chatlearn_core.plugins.records import (
    AlgorithmSpec,
    GeneratorSpec,
    ModelFamilySpec,
    RewardSpec,
    RuntimeSpec,
    TrainerSpec,
    WeightSyncSpec,
)
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.protocols import Algorithm, AlgorithmContext, Loss, ModelSource
from chatlearn_core.protocols.model_family import ModelFamily
from chatlearn_core.runtime.plan import BackendPlan, RolePlan, RunPlan, WeightSyncPlan
from chatlearn_core.types import OutputName, Payload, SamplingParams

_MIB = 1 << 20


@dataclass(slots=True, frozen=True)
class Assembly:
    """A run that has been checked as far as it can be without starting an engine."""

    loaded: LoadedConfig
    registry: PluginRegistry
    algorithm: Algorithm
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


def assemble(loaded: LoadedConfig, registry: PluginRegistry) -> Assembly:
    """Build what a run needs and check that the pieces fit; starts no engine and touches no device.

    Raises:
        ConfigError, FlowError, ModelError, DataError, PluginError: what does not fit, and where it was asked for.
    """
    config = loaded.config
    family = _model_family(registry)
    source = model_source(config.model, config.model)
    facts = family.facts(source)
    sampling = sampling_params(config.sampling)
    eval_sampling = sampling_params(config.eval.sampling) if config.eval.sampling else greedy(sampling)
    algorithm = build_algorithm(loaded, registry)
    graph = trace_flow(loaded, algorithm)
    losses = algorithm.losses()
    _check_roles(config, graph, losses)
    _check_outputs(loaded, graph, losses)
    _check_partial_rollouts(config, graph)
    evaluates = bool(config.data.eval)
    evaluation = trace(evaluation_flow, _kinds(config), name="evaluation") if evaluates else None
    max_length = min(config.model.max_length or facts.max_length, facts.max_length)
    room = max(sampling.max_tokens, eval_sampling.max_tokens) if algorithm.input == "prompts" or evaluates else 1
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
    tokenizer = family.load_tokenizer(source)
    train_set = build_dataset(
        config.data,
        tokenizer,
        registry,
        input=algorithm.input,
        max_prompt_tokens=room_for_prompt,
        max_length=max_length,
        split="train",
    )
    eval_set = None
    if evaluates:
        eval_set = build_dataset(
            config.data,
            tokenizer,
            registry,
            input="prompts",
            max_prompt_tokens=room_for_prompt,
            max_length=max_length,
            split="eval",
        )
    return Assembly(
        loaded=loaded,
        registry=registry,
        algorithm=algorithm,
        graph=graph,
        evaluation=evaluation,
        plan=_plan(loaded, registry, graph, evaluation, losses),
        train_set=train_set,
        eval_set=eval_set,
        sampling=sampling,
        eval_sampling=eval_sampling,
        group_rewards=_group_rewards(loaded),
    )


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


def model_source(model: ModelConfig, default: ModelConfig, head: str = "lm") -> ModelSource:
    """A model section as backends take it."""
    return ModelSource(
        path=model.path,
        tokenizer_path=model.tokenizer or (model.path if model is not default else default.tokenizer or model.path),
        head=cast(Any, head),
        max_length=model.max_length,
        trust_remote_code=model.trust_remote_code,
    )


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
    choice = _choice(loaded, "algorithm")
    assert isinstance(choice.record, AlgorithmSpec)
    context = AlgorithmContext(
        basis=sampling.basis,
        max_completion_tokens=sampling.max_tokens,
        roles={name: role.kind for name, role in loaded.config.roles.items()},
    )
    algorithm: Algorithm = registry.load_factory(choice.record)(choice.options, context)
    return algorithm


def trace_flow(loaded: LoadedConfig, algorithm: Algorithm) -> Graph:
    """The checked graph of an algorithm's flow over the configured roles."""
    config = loaded.config
    return trace(algorithm.flow, _kinds(config), name=config.algorithm.name, input_kind=algorithm.input)


def _kinds(config: RunConfig) -> dict[str, str]:
    return {name: role.kind for name, role in config.roles.items()}


def _choice(loaded: LoadedConfig, *path: str | int) -> SelectedPlugin:
    choice = loaded.chosen(*path)
    assert choice is not None, f"validation lets no configuration through that chooses nothing at {path}"
    return choice


def _check_roles(config: RunConfig, graph: Graph, losses: Mapping[str, Loss]) -> None:
    """Every role is used by something, has the head that its calls and its loss need, and learns if it has a loss."""
    for learner in losses:
        if learner not in config.roles or config.roles[learner].kind != "trainer":
            raise ConfigError(
                f"algorithm {config.algorithm.name!r} trains the role {learner!r}, but the configuration defines no "
                f"trainer of that name. Add roles.{learner} with kind: trainer"
            )
        if config.roles[learner].trainable is False:
            raise ConfigError(
                f"roles.{learner}.trainable is false, but algorithm {config.algorithm.name!r} trains this role. Remove "
                "the setting"
            )
    for name, head, by in _heads_needed(graph, losses):
        if config.roles[name].head != head:
            raise ConfigError(
                f"roles.{name}.head is {config.roles[name].head!r}, but {by} needs the head {head!r}. Set it to {head}"
            )
    for name, role in config.roles.items():
        if role.kind == "trainer" and role.trainable and name not in losses:
            raise ConfigError(
                f"roles.{name}.trainable is true, but algorithm {config.algorithm.name!r} has no loss for it; it "
                f"trains {', '.join(losses)}. Remove the setting or rename the role"
            )
        if name not in graph.roles and name not in losses and role.kind == "trainer":
            raise ConfigError(
                f"roles.{name} is defined, but the flow of algorithm {config.algorithm.name!r} never calls it. Remove "
                "the role, or set the option that uses it"
            )


def _heads_needed(graph: Graph, losses: Mapping[str, Loss]) -> Iterator[tuple[str, str, str]]:
    """(role, head, what needs it) of every call on a trainer role and every loss."""
    for node in graph.nodes:
        if node.method.head is not None:
            yield node.role, node.method.head, f"{node.name} of the flow ({node.source})"
    head_of = {method.output: method.head for method in METHODS.values() if method.output is not None}
    for role, loss in losses.items():
        for output in sorted(loss.needs.names & head_of.keys()):
            head = head_of[output]
            assert head is not None, f"{output} is computed by a trainer"
            yield role, head, f"the output {output!r}, which its loss reads,"


def _check_outputs(loaded: LoadedConfig, graph: Graph, losses: Mapping[str, Loss]) -> None:
    """Every trainer provides what the flow and the losses ask of it."""
    wanted: dict[str, dict[OutputName, str]] = {}
    for node in graph.nodes:
        if node.method.output is not None:
            wanted.setdefault(node.role, {})[node.method.output] = f"the flow ({node.source})"
    for role, loss in losses.items():
        for output in loss.needs.names:
            wanted.setdefault(role, {}).setdefault(output, f"the loss of {loaded.config.algorithm.name!r}")
    for role, outputs in wanted.items():
        record = _choice(loaded, "roles", role).record
        assert isinstance(record, TrainerSpec)
        for output, by in outputs.items():
            if output not in record.outputs:
                raise ConfigError(
                    f"{by} needs the output {output!r} of role {role!r}, but trainer {record.name!r} provides "
                    f"{', '.join(sorted(record.outputs))}. Choose another trainer or other algorithm options"
                )


def _check_partial_rollouts(config: RunConfig, graph: Graph) -> None:
    """What may be unfinished when a step ends is what a generator samples."""
    if config.rollout.partial != "none" and not graph.calls("generate"):
        raise ConfigError(
            f"rollout.partial is {config.rollout.partial!r}, but the flow of algorithm {config.algorithm.name!r} "
            "generates nothing. Set rollout.partial to none"
        )


def _plan(
    loaded: LoadedConfig,
    registry: PluginRegistry,
    graph: Graph,
    evaluation: Graph | None,
    losses: Mapping[str, Loss],
) -> RunPlan:
    config = loaded.config
    used = set(graph.roles) | set(losses) | set(evaluation.roles if evaluation else ())
    roles = {name: _role_plan(loaded, name, name in losses) for name in config.roles if name in used}
    return RunPlan(
        registry=registry,
        roles=roles,
        weight_syncs=tuple(_weight_syncs(loaded, registry, roles)),
        run_dir=Path(config.output_dir),
        seed=config.seed,
        total_updates=config.train.steps * config.train.epochs * config.train.mini_batches,
    )


def _role_plan(loaded: LoadedConfig, name: str, learns: bool) -> RolePlan:
    config = loaded.config
    role: RoleConfig = config.roles[name]
    if role.parts:
        backends = tuple(_reward_part(loaded, name, index, part) for index, part in enumerate(role.parts))
    else:
        choice = _choice(loaded, "roles", name)
        assert isinstance(choice.record, TrainerSpec | GeneratorSpec | RewardSpec)
        backends = (BackendPlan(f"roles.{name}", choice.record, choice.options),)
    return RolePlan(
        name=name,
        kind=role.kind,
        backends=backends,
        model=None if role.kind == "reward" else model_source(role.model or config.model, config.model, role.head),
        head=role.head,
        device=role.device,
        replicas=role.replicas,
        ranks=role.ranks,
        trainable=learns if role.trainable is None else role.trainable,
        engine=role.engine,
        timeout_s=role.timeout_s,
    )


def _reward_part(loaded: LoadedConfig, role: str, index: int, part: RewardPart) -> BackendPlan:
    choice = _choice(loaded, "roles", role, "parts", index)
    assert isinstance(choice.record, RewardSpec)
    sources = None if part.data_sources is None else frozenset(part.data_sources)
    return BackendPlan(f"roles.{role}.parts.{index}", choice.record, choice.options, part.weight, sources)


def _weight_syncs(
    loaded: LoadedConfig, registry: PluginRegistry, roles: Mapping[str, RolePlan]
) -> list[WeightSyncPlan]:
    """From the policy to every generator that samples from it; a generator with a model of its own keeps it."""
    config = loaded.config
    policies = [role for role in roles.values() if role.kind == "trainer" and role.trainable and role.head == "lm"]
    syncs: list[WeightSyncPlan] = []
    runtime = _choice(loaded, "runtime")
    assert isinstance(runtime.record, RuntimeSpec)
    placement = placement_of(runtime.record, runtime.options)
    for generator in (role for role in roles.values() if role.kind == "generator"):
        if not policies or config.roles[generator.name].model is not None:
            continue
        policy = policies[0]
        trainer_record, generator_record = policy.backend.record, generator.backend.record
        assert isinstance(trainer_record, TrainerSpec)
        assert isinstance(generator_record, GeneratorSpec)
        _check_payload(config.weight_sync.payload, policy, generator)
        choice = loaded.chosen("weight_sync")
        if choice is None:
            record, why = choose_transport(
                trainer_record,
                generator_record,
                registry.records("weight_sync"),
                placement,
                config.weight_sync.payload,
                rolling=config.weight_sync.fleet_rule == "rolling",
            )
            options = registry.load_options(record)(**config.weight_sync.options)
        else:
            assert isinstance(choice.record, WeightSyncSpec)
            record, options, why = choice.record, choice.options, "weight_sync.backend names it"
        channel = shared_channel(record, generator_record, config.weight_sync.payload)
        assert channel is not None, "cross-checks refuse a transport that the generator has no channel for"
        syncs.append(
            WeightSyncPlan(
                trainer=policy.name,
                generator=generator.name,
                record=record,
                options=options,
                why=why,
                fleet_rule=config.weight_sync.fleet_rule,
                bucket_bytes=config.weight_sync.bucket_mb * _MIB,
                timeout_s=config.weight_sync.timeout_s,
                channel=channel,
                payload=config.weight_sync.payload,
                max_loading=config.weight_sync.max_loading,
            )
        )
    return syncs


def _check_payload(payload: Payload, *ends: RolePlan) -> None:
    """Both ends take the payload with the options they have; which payloads their plugins know was checked before."""
    for role in ends:
        payloads: frozenset[str] | None = getattr(role.backend.options, "payloads", None)
        if payloads is not None and payload not in payloads:
            does = "sends" if role.kind == "trainer" else "takes"
            raise ConfigError(
                f"weight_sync.payload is {payload!r}, but role {role.name!r} ({role.backend.record.name}) {does} "
                f"{', '.join(map(repr, sorted(payloads)))} with the options it has. Set roles.{role.name}.options for "
                "adapters on both ends (lora) and payload: adapter, or on neither and payload: full; a trainer with "
                "adapters may also send the merged model (full)"
            )


def _group_rewards(loaded: LoadedConfig) -> frozenset[str]:
    """Reward roles with a part that judges whole groups."""
    return frozenset(
        name
        for name, role in loaded.config.roles.items()
        if role.kind == "reward"
        for key in (
            [("roles", name)] if not role.parts else [("roles", name, "parts", i) for i in range(len(role.parts))]
        )
        if getattr(_choice(loaded, *key).record, "unit", "sample") == "group"
    )
