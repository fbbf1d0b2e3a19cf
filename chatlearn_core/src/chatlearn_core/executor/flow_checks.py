"""What a flow and its losses ask of the configured roles, checked before anything starts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch

from chatlearn_core.config.load import LoadedConfig
from chatlearn_core.config.models import RunConfig
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.flow import Graph
from chatlearn_core.plugins.records import GeneratorSpec, OutputSpec, TrainerSpec
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.protocols import Loss

Losses = Mapping[str, tuple[Loss, ...]]
"""Role that learns -> its losses."""


def check_roles(
    config: RunConfig,
    graph: Graph,
    losses: Losses,
    outputs: Mapping[str, OutputSpec],
    evaluation: Graph | None = None,
) -> None:
    """Every role is used by something, has the head that its calls and its loss need, and learns if it has a loss.

    Args:
        outputs: everything that the installed plugins describe.
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
        if name not in _used(config, {*graph.roles, *losses, *(evaluation.roles if evaluation else ())}):
            raise ConfigError(
                f"roles.{name} is defined, but the flow of algorithm {config.algorithm.name!r} never calls it. Remove "
                "the role, or set the option that uses it"
                + (" (several rewards are the parts of one role)" if role.kind == "reward" else "")
            )


def _used(config: RunConfig, called: set[str]) -> set[str]:
    """The roles that are called, and those that they call."""
    return called | {used for name in called if name in config.roles for used in config.roles[name].uses.values()}


def _each(losses: Losses) -> Iterator[tuple[str, Loss]]:
    return ((role, loss) for role, of_role in losses.items() for loss in of_role)


def _heads_needed(graph: Graph, losses: Losses, outputs: Mapping[str, OutputSpec]) -> Iterator[tuple[str, str, str]]:
    """(role, head, what needs it) of every call on a trainer role and every loss."""
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
    """Every trainer provides what the flow and the losses ask of it, and every output has a record."""
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
    """A loss that reads an output gives the arguments which the output's record names."""
    for argument in (*output.from_batch, *(size for size in output.shape if isinstance(size, str))):
        if argument not in loss.needs.arguments:
            raise ConfigError(
                f"{by} reads the output {name!r} without its argument {argument!r}: its needs must have "
                f"OutputRequest(..., arguments={{{argument!r}: ...}})"
            )


def check_scores(loaded: LoadedConfig, graph: Graph) -> None:
    """Every generator that the flow asks for logprobs of given tokens declares that it gives them."""
    for node in graph.calls("generator.score"):
        record = loaded.plugin("roles", node.role).record
        assert isinstance(record, GeneratorSpec)
        if not record.scores:
            raise ConfigError(
                f"{node.source}: {node.name} asks for logprobs of given tokens, which generator {record.name!r} (role "
                f"{node.role!r}) does not give. Choose a generator that does (transformers), or a trainer role and its "
                "method logprobs"
            )


def check_partial_rollouts(config: RunConfig, graph: Graph) -> None:
    """What may be unfinished when a step ends is what a generator samples."""
    if config.rollout.partial == "none":
        return
    calls = [node for node in graph.nodes if node.kind == "generator"]
    if len(calls) > 1:
        raise ConfigError(
            f"rollout.partial is {config.rollout.partial!r}, but the flow of algorithm {config.algorithm.name!r} calls "
            f"generators {len(calls)} times, the second time with {calls[1].name} ({calls[1].source}), and only what "
            "one call samples can go on in a later step. Set rollout.partial to none"
        )
    if not graph.calls("generator.generate"):
        raise ConfigError(
            f"rollout.partial is {config.rollout.partial!r}, but the flow of algorithm {config.algorithm.name!r} "
            "generates nothing. Set rollout.partial to none"
        )


def check_devices(config: RunConfig) -> None:
    """Every device is one that torch knows; whether this machine has it is seen when the role starts."""
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
    """Nothing is sampled that depends on what a role computes whose weights change: sampling comes before updates."""
    for node in graph.stages(changing)[1]:
        if node.kind == "generator":
            roles = sorted({graph.nodes[i].role for i in graph.ancestors(node.index)} & set(changing))
            raise ConfigError(
                f"{node.source}: {node.name} needs what {', '.join(map(repr, roles))} computes, but algorithm "
                f"{config.algorithm.name!r} trains that role or it follows one (refresh), so its calls are made when "
                "samples are taken for an update and nothing is generated any more. Call a role that does not learn"
            )
