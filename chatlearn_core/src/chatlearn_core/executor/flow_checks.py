"""What a flow and its losses ask of the configured roles, checked before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from chatlearn_core.config.load import LoadedConfig
from chatlearn_core.config.models import RunConfig
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.flow import Graph
from chatlearn_core.flow.graph import METHODS
from chatlearn_core.plugins.records import TrainerSpec
from chatlearn_core.protocols import Loss
from chatlearn_core.types import OutputName


def check_roles(config: RunConfig, graph: Graph, losses: Mapping[str, Loss], evaluation: Graph | None = None) -> None:
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
        if name not in {*graph.roles, *losses, *(evaluation.roles if evaluation else ())}:
            raise ConfigError(
                f"roles.{name} is defined, but the flow of algorithm {config.algorithm.name!r} never calls it. Remove "
                "the role, or set the option that uses it"
                + (" (several rewards are the parts of one role)" if role.kind == "reward" else "")
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


def check_outputs(loaded: LoadedConfig, graph: Graph, losses: Mapping[str, Loss]) -> None:
    """Every trainer provides what the flow and the losses ask of it."""
    wanted: dict[str, dict[OutputName, str]] = {}
    for node in graph.nodes:
        if node.method.output is not None:
            wanted.setdefault(node.role, {})[node.method.output] = f"the flow ({node.source})"
    for role, loss in losses.items():
        for output in loss.needs.names:
            wanted.setdefault(role, {}).setdefault(output, f"the loss of {loaded.config.algorithm.name!r}")
    for role, outputs in wanted.items():
        record = loaded.plugin("roles", role).record
        assert isinstance(record, TrainerSpec)
        for output, by in outputs.items():
            if output not in record.outputs:
                raise ConfigError(
                    f"{by} needs the output {output!r} of role {role!r}, but trainer {record.name!r} provides "
                    f"{', '.join(sorted(record.outputs))}. Choose another trainer or other algorithm options"
                )


def check_partial_rollouts(config: RunConfig, graph: Graph) -> None:
    """What may be unfinished when a step ends is what a generator samples."""
    if config.rollout.partial != "none" and not graph.calls("generate"):
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
