"""``chatlearn cluster up``: derives this node's Ray command from the launcher's environment variables. Pure functions.

torchrun and PAI-DLC set the same variables (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``): under torchrun ``RANK`` counts
processes and ``GROUP_RANK`` counts nodes; in PAI-DLC ``RANK`` counts nodes. SLURM has its own variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from chatlearn_core.exceptions import ConfigError

DEFAULT_PORT = 6379
"""Ray's default port. ``MASTER_PORT`` is used by the launcher's own rendezvous."""


@dataclass(slots=True, frozen=True)
class NodeRole:
    """This node's part in a cluster."""

    launcher: str
    rank: int
    """0 for the head."""
    num_nodes: int
    head: str
    """Host name or address of the head."""
    local_rank: int = 0
    """Index of this process on its node; only the first starts Ray."""

    @property
    def is_head(self) -> bool:
        return self.rank == 0

    def command(self, port: int = DEFAULT_PORT) -> list[str]:
        """Return the ``ray start`` command of this node; it stays in the foreground, so that the launcher notices its
        end.
        """
        if self.is_head:
            return ["ray", "start", "--head", f"--port={port}", "--include-dashboard=false", "--block"]
        return ["ray", "start", f"--address={self.head}:{port}", "--block"]


def node_role(environment: Mapping[str, str]) -> NodeRole:
    """Read the variables of torchrun, PAI-DLC or SLURM, in this order.

    Raises:
        ConfigError: there are none, or one is not a number.
    """
    if "GROUP_RANK" in environment:
        return NodeRole(
            "torchrun",
            _number(environment, "GROUP_RANK"),
            _number(environment, "GROUP_WORLD_SIZE"),
            _text(environment, "MASTER_ADDR"),
            _number(environment, "LOCAL_RANK", 0),
        )
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys():
        return NodeRole(
            "PAI-DLC",
            _number(environment, "RANK"),
            _number(environment, "WORLD_SIZE"),
            _text(environment, "MASTER_ADDR"),
        )
    if "SLURM_NODEID" in environment:
        return NodeRole(
            "SLURM",
            _number(environment, "SLURM_NODEID"),
            _number(environment, "SLURM_NNODES"),
            first_host(_text(environment, "SLURM_JOB_NODELIST")),
            _number(environment, "SLURM_LOCALID", 0),
        )
    raise ConfigError(
        "no launcher was found: neither torchrun (GROUP_RANK, GROUP_WORLD_SIZE, MASTER_ADDR), nor PAI-DLC (RANK, "
        "WORLD_SIZE, MASTER_ADDR), nor SLURM (SLURM_NODEID, SLURM_NNODES, SLURM_JOB_NODELIST) has set its variables."
        " Run this command through one of them on every node, or run `ray start` manually"
    )


def first_host(node_list: str) -> str:
    """Return the first host of a SLURM list: ``gpu[003-005,9],cpu1`` gives ``gpu003``."""
    match = re.match(r"([^\[,]+)(?:\[([^\]]+)\])?([^\[,]*)", node_list)
    if match is None:
        raise ConfigError(f"SLURM_JOB_NODELIST is {node_list!r}; it must name at least one host")
    prefix, numbers, suffix = match.groups()
    if numbers is None:
        return str(prefix)
    return f"{prefix}{re.split('[-,]', numbers)[0]}{suffix}"


def _text(environment: Mapping[str, str], name: str) -> str:
    if not environment.get(name):
        raise ConfigError(f"the environment variable {name} is not set, but others of the same launcher are")
    return environment[name]


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and name not in environment:
        return default
    text = _text(environment, name)
    if not text.isdigit():
        raise ConfigError(f"the environment variable {name} is {text!r}; it must be a whole number, 0 or more")
    return int(text)
