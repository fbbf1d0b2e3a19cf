"""The graph of a flow: one node a call on a role, edges where one call's samples are another's input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from chatlearn_core.types import OutputName

Granularity = Literal["sample", "group", "batch"]
"""When a call may start: as soon as one sample (or one whole group) is there, or when all samples are."""


@dataclass(slots=True, frozen=True)
class Method:
    """A call that flows may make on roles of one kind."""

    name: str
    kind: str
    takes: Literal["prompts", "samples"]
    field: str
    """What it adds to each sample; ``{role}`` stands for the role's name."""
    granularity: Granularity
    head: str | None = None
    """Trainer roles only: the head the role must have."""
    output: OutputName | None = None
    """Trainer roles only: the output that is computed."""


METHODS: Mapping[tuple[str, str], Method] = {
    (method.kind, method.name): method
    for method in (
        Method("generate", "generator", "prompts", "completion", "sample"),
        Method("score", "reward", "samples", "reward", "sample"),
        Method("logprobs", "trainer", "samples", "{role}_logprobs", "batch", "lm", "logprobs"),
        Method("entropy", "trainer", "samples", "{role}_entropy", "batch", "lm", "entropy"),
        Method("values", "trainer", "samples", "{role}_values", "batch", "value", "values"),
        Method("scores", "trainer", "samples", "{role}_scores", "batch", "reward", "scores"),
    )
}
"""(kind, method name) -> method: the vocabulary of flows."""


@dataclass(slots=True, frozen=True)
class Node:
    """One call of the flow."""

    index: int
    role: str
    method: Method
    inputs: tuple[int, ...]
    """Indices of the nodes whose results it needs; empty: the flow's own input."""
    source: str
    """``file:line`` of the call."""

    @property
    def name(self) -> str:
        return f"{self.role}.{self.method.name}"

    @property
    def field(self) -> str:
        """Name of what this call adds to each sample."""
        return self.method.field.format(role=self.role)


@dataclass(slots=True, frozen=True)
class Graph:
    """A checked flow. Nodes are in the order of their calls, so every node's inputs come before it."""

    name: str
    nodes: tuple[Node, ...]
    roles: Mapping[str, str]
    """Every role that occurs, and its kind."""

    @property
    def levels(self) -> tuple[tuple[Node, ...], ...]:
        """Nodes by depth. Those of one level need nothing from each other and may run at the same time."""
        depth: dict[int, int] = {}
        for node in self.nodes:
            depth[node.index] = 1 + max((depth[i] for i in node.inputs), default=-1)
        return tuple(
            tuple(node for node in self.nodes if depth[node.index] == level)
            for level in range(max(depth.values(), default=-1) + 1)
        )

    def calls(self, method: str) -> tuple[Node, ...]:
        """The nodes that call ``method``."""
        return tuple(node for node in self.nodes if node.method.name == method)
