"""Turns a checked configuration into the plan for a runtime: roles with their backends, and weight syncs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from chatlearn_core.config.load import LoadedConfig
from chatlearn_core.config.models import ModelConfig, RewardPart, RoleConfig, RunConfig
from chatlearn_core.exceptions import ConfigError, PluginIncompatibleError
from chatlearn_core.executor.learning_plan import LearningPlan
from chatlearn_core.flow import Graph
from chatlearn_core.plugins.compatibility import (
    RoleSize,
    choose_transport,
    mismatches,
    placement_of,
    share_gpus,
    shared_way,
)
from chatlearn_core.plugins.records import (
    EnvironmentSpec,
    Export,
    GeneratorSpec,
    RewardSpec,
    RuntimeSpec,
    TrainerSpec,
    WeightSyncSpec,
)
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.protocols import ModelSource
from chatlearn_core.runtime.plan import BackendPlan, Refresh, RewardGate, RolePlan, RunPlan, WeightRoute
from chatlearn_core.types import Payload

_MIB = 1 << 20


def plan_run(
    loaded: LoadedConfig,
    registry: PluginRegistry,
    graph: Graph,
    evaluations: Collection[Graph],
    learning: LearningPlan,
    policy: str | None,
) -> RunPlan:
    """Plan the roles that flow, evaluations and losses use, and the weight syncs from the policy to its generators.

    Args:
        policy: the role whose weights the generators serve; None: no language model is trained.

    Raises:
        ConfigError: ``weight_sync`` does not fit the two ends, or the options of the two ends.
    """
    config = loaded.config
    used = {*learning.learners}.union(*(one.roles for one in (graph, *evaluations)))
    used |= {called for name in used for called in config.roles[name].used_roles}
    roles = {name: _role_plan(loaded, name, learning) for name in config.roles if name in used}
    for name, role in roles.items():
        if role.refresh is not None:
            refresh = _with_route(loaded, registry, roles[role.refresh.role], role, role.refresh)
            roles[name] = replace(role, refresh=refresh)
    return RunPlan(
        registry=registry,
        roles=roles,
        weight_syncs=() if policy is None else tuple(_weight_syncs(loaded, registry, roles, roles[policy])),
        run_dir=run_directory(config),
        seed=config.seed,
    )


def run_directory(config: RunConfig) -> Path:
    """``output_dir``, with ``~`` as the home directory."""
    return Path(config.output_dir).expanduser()


def with_vocab_sizes(plan: RunPlan, sizes: Mapping[str, int]) -> RunPlan:
    """The plan, completed with vocabulary sizes read from the roles' models."""
    roles: dict[str, RolePlan] = {}
    for name, role in plan.roles.items():
        model = role.model
        roles[name] = role if model is None else replace(role, model=replace(model, vocab_size=sizes.get(name)))
    return replace(plan, roles=roles)


def model_source(model: ModelConfig, default: ModelConfig, head: str = "lm") -> ModelSource:
    """A model section in the form that backends receive."""
    return ModelSource(
        path=model.path,
        tokenizer_path=model.tokenizer or (model.path if model is not default else default.tokenizer or model.path),
        head=cast(Any, head),
        max_length=model.max_length,
        trust_remote_code=model.trust_remote_code,
    )


def _role_plan(loaded: LoadedConfig, name: str, learning: LearningPlan) -> RolePlan:
    config = loaded.config
    role: RoleConfig = config.roles[name]
    if role.parts:
        backends = tuple(_reward_part(loaded, name, index, part) for index, part in enumerate(role.parts))
    else:
        choice = loaded.plugin("roles", name)
        assert isinstance(choice.record, TrainerSpec | GeneratorSpec | RewardSpec | EnvironmentSpec)
        backends = (BackendPlan(f"roles.{name}", choice.record, choice.options, uses=dict(role.uses)),)
    return RolePlan(
        name=name,
        kind=role.kind,
        backends=backends,
        model=model_source(role.model or config.model, config.model, role.head),
        head=role.head,
        device=role.device,
        replicas=role.replicas,
        ranks=role.ranks,
        trainable=name in learning.losses if role.trainable is None else role.trainable,
        engine=role.engine,
        timeout_s=role.timeout_s,
        refresh=_refresh(name, role, learning),
        total_updates=learning.num_updates.get(name),
        max_turns=role.max_turns,
    )


def _refresh(name: str, role: RoleConfig, learning: LearningPlan) -> Refresh | None:
    if role.refresh is None:
        return None
    if name in learning.losses or role.refresh.role not in learning.losses:
        raise ConfigError(
            f"roles.{name}.refresh takes the weights of {role.refresh.role!r}: that role must learn and {name!r} must "
            f"not, and the algorithm trains {', '.join(learning.losses)}. Name one of these, or remove refresh"
        )
    return Refresh(role.refresh.role, role.refresh.every, role.refresh.decay)


def _reward_part(loaded: LoadedConfig, role: str, index: int, part: RewardPart) -> BackendPlan:
    choice = loaded.plugin("roles", role, "parts", index)
    assert isinstance(choice.record, RewardSpec)
    sources = None if part.data_sources is None else frozenset(part.data_sources)
    gate = None if part.gate is None else RewardGate(part.gate.part, part.gate.at_least)
    key = f"roles.{role}.parts.{index}"
    return BackendPlan(key, choice.record, choice.options, part.weight, sources, part.uses, gate)


def _weight_syncs(
    loaded: LoadedConfig, registry: PluginRegistry, roles: Mapping[str, RolePlan], policy: RolePlan
) -> list[WeightRoute]:
    """Syncs from the policy to every generator that samples from it; a generator with its own model keeps it."""
    config = loaded.config
    syncs: list[WeightRoute] = []
    export: Export | None = None if config.weight_sync.export == "auto" else config.weight_sync.export
    runtime = loaded.plugin("runtime")
    assert isinstance(runtime.record, RuntimeSpec)
    for generator in (role for role in roles.values() if role.kind == "generator"):
        if config.roles[generator.name].model is not None:
            continue
        trainer_record, generator_record = policy.backend.record, generator.backend.record
        assert isinstance(trainer_record, TrainerSpec)
        assert isinstance(generator_record, GeneratorSpec)
        _check_payload(config.weight_sync.payload, policy, generator)
        ends = ((policy, trainer_record), (generator, generator_record))
        sizes = [RoleSize.of(role.name, role.kind, role, one) for role, one in ends]
        placement = placement_of(runtime.record, runtime.options, *sizes)
        choice = loaded.chosen("weight_sync")
        if choice is None:
            record, why = choose_transport(
                trainer_record,
                generator_record,
                registry.records("weight_sync"),
                placement,
                config.weight_sync.payload,
                export=export,
                rolling=config.weight_sync.fleet_rule == "rolling",
                devices=[policy.device, generator.device],
                same_gpus=share_gpus(runtime.options, sizes[0], sizes[1], policy.backend.options),
            )
            options = registry.load_options(record)(**config.weight_sync.options)
        else:
            assert isinstance(choice.record, WeightSyncSpec)
            record, options, why = choice.record, choice.options, "weight_sync.backend names it"
            reasons = mismatches(
                trainer_record,
                generator_record,
                record,
                placement,
                config.weight_sync.payload,
                export=export,
                rolling=config.weight_sync.fleet_rule == "rolling",
                devices=[policy.device, generator.device],
            )
            if reasons:  # config/rules reports it earlier if the algorithm's record names the policy
                raise ConfigError(
                    f"weight_sync.backend {record.name!r} does not suit roles {policy.name!r} and {generator.name!r}: "
                    f"{'; '.join(reasons)}. Choose another transport, or 'auto'"
                )
        way = shared_way(
            trainer_record,
            generator_record,
            record,
            placement,
            config.weight_sync.payload,
            export,
            policy.backend.options,
        )
        assert way is not None, "a transport that does not fit both ends is refused above"
        syncs.append(
            WeightRoute(
                trainer=policy.name,
                target=generator.name,
                record=record,
                options=options,
                why=why,
                fleet_rule=config.weight_sync.fleet_rule,
                bucket_bytes=config.weight_sync.bucket_mb * _MIB,
                timeout_s=config.weight_sync.timeout_s,
                export=way[0],
                channel=way[1],
                payload=config.weight_sync.payload,
                max_loading=config.weight_sync.max_loading,
            )
        )
    return syncs


def _with_route(
    loaded: LoadedConfig, registry: PluginRegistry, source: RolePlan, follower: RolePlan, refresh: Refresh
) -> Refresh:
    """A refresh with the weight sync that brings it: the transport that ``weight_sync`` names if it suits both
    trainers, else the fastest that does; without any, or where the two models may differ, why not.
    """
    config = loaded.config.weight_sync
    runtime = loaded.plugin("runtime")
    trainer, taker = source.backend.record, follower.backend.record
    assert isinstance(runtime.record, RuntimeSpec)
    assert isinstance(trainer, TrainerSpec)
    assert isinstance(taker, TrainerSpec)
    if not runtime.record.refreshes:
        return replace(refresh, why_directory=f"runtime {runtime.record.name!r} connects no trainers with each other")
    if not taker.channels:
        return replace(refresh, why_directory=f"trainer {taker.name!r} takes weights from model directories only")
    if source.head != follower.head:
        heads = f"{source.name!r} has head {source.head!r} and {follower.name!r} has head {follower.head!r}"
        return replace(refresh, why_directory=f"{heads}, and a head that does not arrive is drawn anew")
    placement = placement_of(runtime.record, runtime.options)
    export: Export | None = None if config.export == "auto" else config.export
    devices = [source.device, follower.device]
    choice = loaded.chosen("weight_sync")
    record, why = None, ""
    if choice is not None:
        assert isinstance(choice.record, WeightSyncSpec)
        if not mismatches(trainer, taker, choice.record, placement, export=export, devices=devices):
            record, why = choice.record, "weight_sync.backend names it"
    if record is None:
        try:
            record, why = choose_transport(
                trainer, taker, registry.records("weight_sync"), placement, export=export, devices=devices
            )
        except PluginIncompatibleError as error:
            return replace(refresh, why_directory=str(error).splitlines()[0])
    model = registry.load_options(record)
    options = model(**{name: value for name, value in config.options.items() if name in model.model_fields})
    way = shared_way(trainer, taker, record, placement, export=export, options=source.backend.options)
    assert way is not None, "a transport that does not suit both ends is not taken"
    route = WeightRoute(
        trainer=source.name,
        target=follower.name,
        record=record,
        options=options,
        why=why,
        fleet_rule="barrier",
        bucket_bytes=config.bucket_mb * _MIB,
        timeout_s=config.timeout_s,
        export=way[0],
        channel=way[1],
    )
    return replace(refresh, route=route)


def _check_payload(payload: Payload, *ends: RolePlan) -> None:
    """Check that both ends' options allow the payload; whether their plugins know it was checked before."""
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
