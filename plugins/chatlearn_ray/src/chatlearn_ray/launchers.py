"""The launchers torchrun, PAI-DLC and SLURM: a process's part from its environment variables. Pure functions.

torchrun and PAI-DLC set the same variables (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``): under torchrun ``RANK`` counts
processes and ``GROUP_RANK`` counts nodes; in PAI-DLC ``RANK`` counts nodes. SLURM has its own variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.protocols import NodePart


def torchrun(environment: Mapping[str, str]) -> NodePart | None:
    """See ``Launcher``."""
    if "GROUP_RANK" not in environment:
        return None
    return _part(environment, "GROUP_RANK", "GROUP_WORLD_SIZE", _text(environment, "MASTER_ADDR"), "LOCAL_RANK")


def pai_dlc(environment: Mapping[str, str]) -> NodePart | None:
    """See ``Launcher``."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys():
        return None
    return _part(environment, "RANK", "WORLD_SIZE", _text(environment, "MASTER_ADDR"))


def slurm(environment: Mapping[str, str]) -> NodePart | None:
    """See ``Launcher``."""
    if "SLURM_NODEID" not in environment:
        return None
    head = first_host(_text(environment, "SLURM_JOB_NODELIST"))
    return _part(environment, "SLURM_NODEID", "SLURM_NNODES", head, "SLURM_LOCALID")


def first_host(node_list: str) -> str:
    """Return the first host of a SLURM list: ``gpu[003-005,9],cpu1`` gives ``gpu003``.

    Raises:
        ConfigError: the list names no host.
    """
    match = re.match(r"([^\[,]+)(?:\[([^\]]+)\])?([^\[,]*)", node_list)
    if match is None:
        raise ConfigError(f"SLURM_JOB_NODELIST is {node_list!r}; it must name at least one host")
    prefix, numbers, suffix = match.groups()
    if numbers is None:
        return str(prefix)
    return f"{prefix}{re.split('[-,]', numbers)[0]}{suffix}"


def _part(environment: Mapping[str, str], rank: str, num_nodes: str, head: str, local_rank: str = "") -> NodePart:
    part = NodePart(
        _number(environment, rank),
        _number(environment, num_nodes),
        head,
        _number(environment, local_rank) if local_rank in environment else 0,
    )
    if part.rank >= part.num_nodes:
        raise ConfigError(
            f"the environment variable {rank} is {part.rank}, and {num_nodes} is {part.num_nodes}; ranks are smaller "
            "than the number of nodes"
        )
    return part


def _text(environment: Mapping[str, str], name: str) -> str:
    if not environment.get(name):
        raise ConfigError(f"the environment variable {name} is not set, but others of the same launcher are")
    return environment[name]


def _number(environment: Mapping[str, str], name: str) -> int:
    text = _text(environment, name)
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"the environment variable {name} is {text!r}; it must be a whole number, 0 or more")
    return int(text)
