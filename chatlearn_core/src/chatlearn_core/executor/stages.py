"""Assigns a flow's calls to two stages: making rollouts, and training on them."""

from __future__ import annotations

from collections.abc import Collection

from chatlearn_core.flow import Graph, Node


def step_stages(graph: Graph, changing: Collection[str]) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """The production and the consumption stage of steps that produce their own rollouts.

    These are ``Graph.stages`` with one change: calls on frozen trainers that no other production call needs, such as a
    reference's logprobs, move to consumption. They return the same in either stage, and in consumption they run
    concurrently with calls on trained roles on other devices, and only for rollouts that a step takes.

    Args:
        changing: roles whose weights change: trained roles and the roles refreshed from them.
    """
    production, consumption = graph.stages(changing)
    late: set[int] = set()
    for node in reversed(production):
        needed = any(node.index in other.inputs for other in production if other.index not in late)
        if node.kind in ("trainer", "cache") and not needed:
            late.add(node.index)
    return (
        tuple(node for node in production if node.index not in late),
        tuple(node for node in graph.nodes if node in consumption or node.index in late),
    )
