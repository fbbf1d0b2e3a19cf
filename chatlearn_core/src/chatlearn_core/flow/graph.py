"""The graph of a flow: one node per call, and an edge where a call takes another call's samples."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chatlearn_core.plugins.records import FlowMethodSpec, Granularity, OutputSpec


@dataclass(slots=True, frozen=True)
class FunctionCall:
    """A user's function that a flow applies to samples."""

    name: str
    """Import string: ``acme_flows.selection:best_of``."""
    function: Callable[..., Any]
    granularity: Granularity
    timeout_s: float
    """Timeout of one call of the function, seconds."""

    @property
    def place(self) -> str:
        """Name and file, for messages."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        return f"{self.name} ({code.co_filename}:{code.co_firstlineno})" if code else self.name


@dataclass(slots=True, frozen=True)
class Node:
    """One call of the flow."""

    index: int
    role: str
    method: FlowMethodSpec
    inputs: tuple[int, ...]
    """Indices of the nodes whose results this node needs; empty means the flow's own input."""
    source: str
    """``file:line`` of the call."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The call's arguments besides samples and ``name``: JSON values checked by the method's model."""
    given_name: str | None = None
    """The argument ``name``."""
    outputs: tuple[OutputSpec, ...] = ()
    """The outputs that the method requests from a trainer role."""
    samples_of: tuple[int, ...] = ()
    """The nodes that made this node's samples, in order; empty means the flow's own input."""
    function: FunctionCall | None = None
    """The function that ``m.apply`` calls; None for calls on roles."""
    uses: tuple[str, ...] = ()
    """Other roles that the role calls in turn, such as the judge of a reward."""

    @property
    def kind(self) -> str:
        """Kind of the role."""
        return self.method.role_kind

    @property
    def granularity(self) -> Granularity:
        """When it may start."""
        return self.method.granularity if self.function is None else self.function.granularity

    @property
    def name(self) -> str:
        return f"{self.role}.{self.method.method}" if self.function is None else f"apply {self.function.name}"

    @property
    def call(self) -> str:
        """The call as a flow writes it: ``generator.generate(temperature=0)``."""
        given = dict(self.arguments) | ({"name": self.given_name} if self.given_name is not None else {})
        return self.name + (f"({', '.join(f'{k}={json.dumps(v)}' for k, v in given.items())})" if given else "")

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the data that this call adds to each sample."""
        return (*self.output_fields.values(), *(self._named(entry) for entry in self.method.adds))

    @property
    def output_fields(self) -> dict[str, str]:
        """Output name -> name of its data in the samples."""
        own = () if self.method.other_samples else self.method.outputs
        return {name: f"{self.given_name or self.role}_{name}" for name in own}

    def _named(self, entry: str) -> str:
        if "{name}" in entry:
            return entry.format(name=self.given_name or self.role)
        return entry if self.given_name is None else f"{self.given_name}_{entry}"


@dataclass(slots=True, frozen=True)
class Graph:
    """A checked flow. Nodes are in call order, so that every node follows its inputs."""

    name: str
    nodes: tuple[Node, ...]
    roles: Mapping[str, str]
    """Every role in the flow, and its kind."""
    used_roles: Mapping[str, str] = field(default_factory=dict)
    """Every role that a role in the flow calls in turn (``Node.uses``), and its kind."""

    @property
    def levels(self) -> tuple[tuple[Node, ...], ...]:
        """Nodes by depth. Nodes of one level are independent and may run concurrently."""
        depth: dict[int, int] = {}
        for node in self.nodes:
            depth[node.index] = 1 + max((depth[i] for i in node.inputs), default=-1)
        return tuple(
            tuple(node for node in self.nodes if depth[node.index] == level)
            for level in range(max(depth.values(), default=-1) + 1)
        )

    def calls(self, method: str) -> tuple[Node, ...]:
        """The nodes that call ``method``, such as ``generator.generate``."""
        return tuple(node for node in self.nodes if node.method.name == method)

    def sampled_tokens(self, max_tokens: int) -> int:
        """The largest number of tokens that generation and further turns together add to one sample.

        Args:
            max_tokens: limit of a call that does not set its own.
        """
        total: dict[int, int] = {}
        for node in self.nodes:
            samples = node.method.name in ("generator.generate", "generator.extend")
            own = node.arguments.get("max_tokens", max_tokens) if samples else 0
            total[node.index] = own + max((total[i] for i in node.inputs), default=0)
        return max(total.values(), default=0)

    def ancestors(self, index: int) -> frozenset[int]:
        """The nodes whose results a node needs, directly or indirectly."""
        return ancestors(self.nodes, self.nodes[index].inputs)

    def stages(self, learning_roles: Collection[str]) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
        """The nodes of the production stage and of the consumption stage, each in call order.

        Production runs when a rollout is finished and needs no role that is trained: generation, rewards, frozen
        models. Consumption runs when samples are taken for an update: calls on trained roles, whose results depend on
        the roles' current weights, calls on rewards that use such a role, and every call that needs one of them.
        Generators serve synchronised copies of the policy, so a call on a generator is production.

        Args:
            learning_roles: the roles that the algorithm updates.
        """
        consumption: set[int] = set()
        for node in self.nodes:
            called = {node.role, *node.uses}
            if not called.isdisjoint(learning_roles) or not consumption.isdisjoint(node.inputs):
                consumption.add(node.index)
        return (
            tuple(node for node in self.nodes if node.index not in consumption),
            tuple(node for node in self.nodes if node.index in consumption),
        )


def ancestors(nodes: Sequence[Node], start: Iterable[int]) -> frozenset[int]:
    """``start`` and every node that its nodes need."""
    reached: set[int] = set()
    waiting = list(start)
    while waiting:
        index = waiting.pop()
        if index not in reached:
            reached.add(index)
            waiting.extend(nodes[index].inputs)
    return frozenset(reached)
