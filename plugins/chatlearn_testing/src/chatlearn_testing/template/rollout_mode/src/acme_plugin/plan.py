"""What the plan of a run says about the mode ``acme``."""

from __future__ import annotations

from chatlearn_core.config.load import LoadedConfig
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.flow import Graph

from acme_plugin.options import AcmeOptions


def plan(options: AcmeOptions, loaded: LoadedConfig, graph: Graph) -> list[str]:
    """Lines of the plan.

    Raises:
        ConfigError: the flow of the algorithm generates nothing.
    """
    if not any(node.kind in ("generator", "environment") for node in graph.nodes):
        raise ConfigError(
            f"{loaded.source}: rollout.mode is 'acme', but the flow of algorithm {loaded.config.algorithm.name!r} "
            "generates nothing. Set rollout.mode: sync"
        )
    staleness = loaded.config.rollout.max_staleness
    ahead = 1 if staleness is None else staleness
    return [
        f"acme: rollouts are made up to {ahead} step(s) ahead, while a step trains",
        "at a weight sync: wait until every rollout has ended, so that each completion is of one policy version",
    ]
