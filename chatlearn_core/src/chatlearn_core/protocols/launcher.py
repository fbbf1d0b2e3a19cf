"""Launchers: how the program that starts a process on each node of a cluster tells it its part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, frozen=True)
class NodePart:
    """The part of one process's node in a cluster."""

    rank: int
    """From 0, the head, to ``num_nodes - 1``."""
    num_nodes: int
    head: str
    """Host name or address of the head; the same on every node."""
    local_rank: int = 0
    """Index of this process on its node; only the first starts what a node needs once."""


class Launcher(Protocol):
    """A pure function: it reads nothing but its argument, and changes nothing."""

    def __call__(self, environment: Mapping[str, str]) -> NodePart | None:
        """The part of a process with these environment variables; None if another launcher, or none, started it.

        Called: when ``chatlearn cluster up`` starts; in every process that the launcher started; once.

        Raises:
            ConfigError: a variable is missing or malformed; names it.
        """
