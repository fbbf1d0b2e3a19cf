"""A graph as text for users."""

from __future__ import annotations

from chatlearn_core.flow.graph import Graph, Node


def to_text(graph: Graph) -> str:
    """One line per call, level by level; calls of one level may run concurrently."""
    lines = [f"flow {graph.name}"]
    for depth, level in enumerate(graph.levels):
        lines.append(f"  level {depth}")
        for node in level:
            inputs = ", ".join(graph.nodes[i].name for i in node.inputs) or "input"
            kind = f"{node.kind}, uses {', '.join(node.uses)}" if node.uses else node.kind
            lines.append(
                f"    {node.call:<24} <- {inputs:<28} adds {added(node)} ({_starts(node)}; {kind}; {node.source})"
            )
    return "\n".join(lines)


def added(node: Node) -> str:
    """The data that a call adds to each sample, as text."""
    if node.fields:
        return ", ".join(node.fields)
    return {"extend": "turn", "apply": "its result"}.get(node.method.method, "completion")


def _starts(node: Node) -> str:
    return "when all samples are there" if node.granularity == "batch" else f"{node.granularity} by {node.granularity}"
