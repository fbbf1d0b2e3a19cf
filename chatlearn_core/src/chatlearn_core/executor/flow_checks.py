"""Checks, before anything starts, that the configured roles meet the requirements of the flow and its losses."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from chatlearn_core.config.load import LoadedConfig
from chatlearn_core.config.models import RunConfig
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.flow import Graph
from chatlearn_core.plugins.compatibility import classifies
from chatlearn_core.plugins.records import GeneratorSpec, OutputSpec, RewardSpec, RoleUse, TrainerSpec
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.protocols import Loss

Losses = Mapping[str, tuple[Loss, ...]]
"""Trained role -> its losses."""


def check_roles(
    config: RunConfig,
    graph: Graph,
    losses: Losses,
    outputs: Mapping[str, OutputSpec],
    evaluations: Collection[Graph] = (),
) -> None:
    """Check that every role is used, has the head that its calls and its loss need, and is trainable if it has a loss.

    Args:
        outputs: all outputs that the installed plugins register.
    """
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
    for name, head, by in _heads_needed(graph, losses, outputs):
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
        if name not in _used(config, {*losses}.union(*(one.roles for one in (graph, *evaluations)))):
            raise ConfigError(
                f"roles.{name} is defined, but the flow of algorithm {config.algorithm.name!r} never calls it. Remove "
                "the role, or set the option that uses it"
                + (" (several rewards are the parts of one role)" if role.kind == "reward" else "")
            )


def _used(config: RunConfig, called: set[str]) -> set[str]:
    """The called roles, and the roles that these call in turn."""
    return called.union(*(config.roles[name].used_roles for name in called if name in config.roles))


def _each(losses: Losses) -> Iterator[tuple[str, Loss]]:
    return ((role, loss) for role, of_role in losses.items() for loss in of_role)


def _heads_needed(graph: Graph, losses: Losses, outputs: Mapping[str, OutputSpec]) -> Iterator[tuple[str, str, str]]:
    """(role, head, source of the requirement) of every call on a trainer role and every loss."""
    for node in graph.nodes:
        for output in node.outputs:
            if output.head is not None:
                yield node.role, output.head, f"{node.name} of the flow ({node.source})"
    for role, loss in _each(losses):
        for name in sorted(loss.needs.names):
            head = outputs[name].head if name in outputs else None
            if head is not None:
                yield role, head, f"the output {name!r}, which its loss reads,"


def check_outputs(loaded: LoadedConfig, registry: PluginRegistry, graph: Graph, losses: Losses) -> None:
    """Check that every trainer provides the outputs that the flow and the losses read, and every output has a
    record."""
    wanted: dict[str, dict[str, str]] = {}
    for node in graph.nodes:
        for described in node.outputs:
            wanted.setdefault(node.role, {})[described.name] = f"the flow ({node.source})"
    for role, loss in _each(losses):
        by = f"the loss of {loaded.config.algorithm.name!r}"
        for output in sorted(loss.needs.names):
            wanted.setdefault(role, {}).setdefault(output, by)
            if output not in registry.outputs:
                raise ConfigError(
                    f"{by} reads the output {output!r} of role {role!r}, which no installed plugin describes "
                    f"(chatlearn_outputs); there are {', '.join(sorted(registry.outputs))}"
                )
            _check_arguments(by, output, registry.outputs[output], loss)
    for role, outputs in wanted.items():
        record = loaded.plugin("roles", role).record
        assert isinstance(record, TrainerSpec)
        for output, by in outputs.items():
            if output not in record.outputs:
                raise ConfigError(
                    f"{by} needs the output {output!r} of role {role!r}, but trainer {record.name!r} provides "
                    f"{', '.join(sorted(record.outputs))}. Choose another trainer or other algorithm options"
                )


def _check_arguments(by: str, name: str, output: OutputSpec, loss: Loss) -> None:
    """Check that a loss gives the arguments that the record of an output names."""
    for argument in (*output.from_batch, *(size for size in output.shape if isinstance(size, str))):
        if argument not in loss.needs.arguments:
            raise ConfigError(
                f"{by} reads the output {name!r} without its argument {argument!r}: its needs must have "
                f"OutputRequest(..., arguments={{{argument!r}: ...}})"
            )


def check_scores(loaded: LoadedConfig, graph: Graph) -> None:
    """Check that every generator which the flow asks to score given tokens declares that it can."""
    for node in graph.calls("generator.score"):
        record = loaded.plugin("roles", node.role).record
        assert isinstance(record, GeneratorSpec)
        if not record.scores:
            raise ConfigError(
                f"{node.source}: {node.name} asks for logprobs of given tokens, which generator {record.name!r} (role "
                f"{node.role!r}) does not give. Choose a generator that does (transformers, vllm), or a trainer role "
                "and its method logprobs"
            )


def check_classifiers(loaded: LoadedConfig, graph: Graph) -> None:
    """Check that the flow and its environments let no generator sample that serves a sequence classifier, and that such
    a generator has a model of its own. ``check_uses`` checks rewards.
    """
    asked: dict[str, str] = {}
    for node in graph.nodes:
        if node.kind == "generator":
            asked.setdefault(node.role, f"{node.source}: {node.name}")
        elif node.kind == "environment":
            asked |= dict.fromkeys(loaded.config.roles[node.role].used_roles, f"roles.{node.role} (an environment)")
    for name, role in loaded.config.roles.items():
        if role.kind != "generator" or not _classifies(loaded, name):
            continue
        if name in asked:
            raise ConfigError(
                f"{asked[name]} lets role {name!r} sample, but with its options generator "
                f"{loaded.plugin('roles', name).record.name!r} serves a sequence classifier, which samples nothing. "
                "Name another generator role, or change its options"
            )
        if role.model is None:
            raise ConfigError(
                f"{loaded.source}: roles.{name} serves a sequence classifier with its options, but has no model of its "
                f"own, so it would serve the policy. Set roles.{name}.model.path to a reward model"
            )


def _classifies(loaded: LoadedConfig, name: str) -> bool:
    choice = loaded.plugin("roles", name)
    return isinstance(choice.record, GeneratorSpec) and classifies(choice.record, choice.options)


def check_uses(loaded: LoadedConfig, registry: PluginRegistry, roles: Collection[str]) -> None:
    """Check that every role called by a reward can do what the reward requests: a trainer must compute the outputs and
    have the head that they need; a generator must score given tokens.

    Args:
        roles: the called roles.
    """
    for name in roles:
        for key, handle, used, use in _uses(loaded, name):
            record = loaded.plugin("roles", used).record
            if _classifies(loaded, used):
                if use.classifies:
                    continue
                raise ConfigError(
                    f"{key}.uses.{handle} is {used!r}: this reward lets it sample or score tokens, but with its "
                    f"options generator {record.name!r} serves a sequence classifier, which does neither. Name another "
                    "role, or use the reward model"
                )
            if isinstance(record, GeneratorSpec) and use.scores and not record.scores:
                raise ConfigError(
                    f"{key}.uses.{handle} is {used!r}: this reward asks it for logprobs of given tokens, which "
                    f"generator {record.name!r} does not give"
                    + (", or for the score of a sequence classifier, which it does not serve" if use.classifies else "")
                    + ". Choose a generator that does (transformers, vllm)"
                    + (", or a trainer role" if "trainer" in use.kinds else "")
                )
            if isinstance(record, TrainerSpec):
                for output in sorted(use.outputs):
                    head, given = registry.outputs[output].head, loaded.config.roles[used].head
                    if head is not None and given != head:
                        raise ConfigError(
                            f"{key}.uses.{handle} is {used!r}: this reward asks it for {output!r}, which needs the "
                            f"head {head!r}, and roles.{used}.head is {given!r}. Set it to {head}"
                        )
                    if output not in record.outputs:
                        raise ConfigError(
                            f"{key}.uses.{handle} is {used!r}: this reward asks it for {output!r}, but trainer "
                            f"{record.name!r} provides {', '.join(sorted(record.outputs))}. Choose another trainer"
                        )


def _uses(loaded: LoadedConfig, name: str) -> Iterator[tuple[str, str, str, RoleUse]]:
    """(configuration key, handle, role, requested use) of every role that a reward role calls."""
    role = loaded.config.roles[name]
    if role.kind != "reward":
        return
    sections: list[tuple[tuple[str | int, ...], Mapping[str, str]]] = [(("roles", name), role.uses)]
    if role.parts:
        sections = [(("roles", name, "parts", index), part.uses) for index, part in enumerate(role.parts)]
    for path, uses in sections:
        choice = loaded.plugin(*path)
        assert isinstance(choice.record, RewardSpec)
        for handle, used in uses.items():
            use = choice.record.uses[handle]
            ids = getattr(choice.options, "token_ids", use.token_ids)
            yield ".".join(map(str, path)), handle, used, replace(use, token_ids=ids)


def called_by_text(loaded: LoadedConfig, graphs: Sequence[Graph], learners: Collection[str]) -> frozenset[str]:
    """Roles that receive text alone, from rewards or flows: they may have their own tokenizer.

    Args:
        graphs: the flow and the evaluations.
        learners: roles that learn from the samples' tokens.
    """
    calls = [node for graph in graphs for node in graph.nodes if node.function is None]
    by_text = {node.role for node in calls if node.method.by_text}
    by_ids = {*learners, *(node.role for node in calls if not node.method.by_text)}
    for name in by_text | by_ids:
        if loaded.config.roles[name].kind == "environment":
            by_ids |= loaded.config.roles[name].used_roles
        for _, _, used, use in _uses(loaded, name):
            (by_ids if use.token_ids else by_text).add(used)
    return frozenset(by_text - by_ids)


def check_partial_rollouts(config: RunConfig, graph: Graph) -> None:
    """Check that only a generator's sampling can be unfinished when a step ends."""
    if config.rollout.partial == "none":
        return
    calls = [node for node in graph.nodes if node.kind == "generator"]
    if len(calls) > 1:
        raise ConfigError(
            f"rollout.partial is {config.rollout.partial!r}, but the flow of algorithm {config.algorithm.name!r} calls "
            f"generators {len(calls)} times, the second time with {calls[1].name} ({calls[1].source}), but only"
            " one call can continue in a later step. Set rollout.partial to none"
        )
    for node in graph.nodes:
        if calls and calls[0].role in node.uses:
            raise ConfigError(
                f"rollout.partial is {config.rollout.partial!r}, but roles.{node.role} uses the generator "
                f"{calls[0].role!r} itself ({node.source}), which is paused with completions in it when a step has "
                f"enough. Give {node.role} a generator role of its own, or set rollout.partial to none"
            )
    if not graph.calls("generator.generate"):
        raise ConfigError(
            f"rollout.partial is {config.rollout.partial!r}, but the flow of algorithm {config.algorithm.name!r} "
            "generates nothing. Set rollout.partial to none"
        )


def check_devices(config: RunConfig) -> None:
    """Check that torch knows every device; the start of the role shows whether this machine has it."""
    for name, role in config.roles.items():
        if role.device in ("auto", "cpu", "cuda"):
            continue
        try:
            torch.device(role.device)
        except RuntimeError as error:
            raise ConfigError(
                f"roles.{name}.device is {role.device!r}, which torch does not know: {str(error).splitlines()[0]}. "
                "Set it to auto, cpu, cuda or cuda:N"
            ) from error


def check_stages(config: RunConfig, graph: Graph, changing: Collection[str]) -> None:
    """Check that no generation depends on the results of a role whose weights change: sampling precedes updates."""
    for node in graph.stages(changing)[1]:
        if node.kind == "generator":
            roles = sorted({graph.nodes[i].role for i in graph.ancestors(node.index)} & set(changing))
            raise ConfigError(
                f"{node.source}: {node.name} needs what {', '.join(map(repr, roles))} computes, but algorithm "
                f"{config.algorithm.name!r} trains that role or it follows one (refresh), so its calls are made when "
                "samples are taken for an update and nothing is generated any more. Call a role that does not learn"
            )
