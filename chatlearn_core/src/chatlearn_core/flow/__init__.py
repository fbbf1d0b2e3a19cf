"""Flows: ordinary Python functions over roles, traced once into a graph that is checked, shown and scheduled."""

from chatlearn_core.flow.graph import Graph, Node
from chatlearn_core.flow.show import added, to_text
from chatlearn_core.flow.trace import trace
from chatlearn_core.flow.vocabulary import FlowVocabulary

__all__ = ["FlowVocabulary", "Graph", "Node", "added", "to_text", "trace"]
