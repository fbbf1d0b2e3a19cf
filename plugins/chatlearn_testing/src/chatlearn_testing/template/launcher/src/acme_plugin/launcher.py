"""The launcher ``acme``: an Indexed Job of Kubernetes, one pod for each node.

Kubernetes sets ``JOB_COMPLETION_INDEX`` in each pod. The manifest of the Job sets ``JOB_COMPLETIONS`` to its
``completions``, and ``JOB_HEAD`` to the host name that its headless Service gives the pod with index 0.
"""

from __future__ import annotations

from collections.abc import Mapping

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.protocols import NodePart


def acme(environment: Mapping[str, str]) -> NodePart | None:
    """Implements ``chatlearn_core.protocols.Launcher``: reads nothing but its argument."""
    if "JOB_COMPLETION_INDEX" not in environment:
        return None
    rank = read_number(environment, "JOB_COMPLETION_INDEX")
    num_nodes = read_number(environment, "JOB_COMPLETIONS")
    if rank >= num_nodes:
        raise ConfigError(
            f"the environment variable JOB_COMPLETION_INDEX is {rank}, and JOB_COMPLETIONS is {num_nodes}; set "
            "JOB_COMPLETIONS to the completions of the Job"
        )
    return NodePart(rank, num_nodes, read_text(environment, "JOB_HEAD"))


def read_text(environment: Mapping[str, str], name: str) -> str:
    """The value of a variable.

    Raises:
        ConfigError: it is missing or empty.
    """
    if not environment.get(name):
        raise ConfigError(f"the environment variable {name} is not set; set it in the manifest of the Job")
    return environment[name]


def read_number(environment: Mapping[str, str], name: str) -> int:
    """The value of a variable that is a whole number.

    Raises:
        ConfigError: it is missing or no such number.
    """
    text = read_text(environment, name)
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"the environment variable {name} is {text!r}; it must be a whole number, 0 or more")
    return int(text)
