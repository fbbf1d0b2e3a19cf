"""Flows: ordinary Python functions over roles, traced once into a graph that is checked, shown and scheduled."""

from chatlearn_core.flow.graph import METHODS, Graph, Method, Node
from chatlearn_core.flow.show import to_mermaid, to_svg, to_text
from chatlearn_core.flow.trace import trace

__all__ = ["METHODS", "Graph", "Method", "Node", "to_mermaid", "to_svg", "to_text", "trace"]
