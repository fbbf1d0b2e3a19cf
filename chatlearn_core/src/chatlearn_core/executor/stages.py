"""Which calls of a flow run when rollouts are made, and which when a step trains on them."""

from __future__ import annotations

from collections.abc import Collection

from chatlearn_core.flow import Graph, Node


def step_stages(graph: Graph, changing: Collection[str]) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """The production and the consumption stage of steps that produce their own rollouts.

    These are ``Graph.stages``, but calls on frozen trainers that no other call of the production stage needs, such as a
    reference's logprobs, are consumption: they return the same in either stage, and there they run at the same time as
    the calls on roles that learn, where those have other devices, and only for rollouts that a step takes.

    Args:
        changing: roles whose weights change: those that learn, and those that follow them.
    """
    production, consumption = graph.stages(changing)
    late: set[int] = set()
    for node in reversed(production):
        needed = any(node.index in other.inputs for other in production if other.index not in late)
        if node.kind == "trainer" and not needed:
            late.add(node.index)
    return (
        tuple(node for node in production if node.index not in late),
        tuple(node for node in graph.nodes if node in consumption or node.index in late),
    )
