"""What the plan of a run says about the mode ``acme``."""

from __future__ import annotations

from collections.abc import Sequence

from chatlearn_core.config.load import LoadedConfig
from chatlearn_core.flow import Graph

from acme_plugin.options import AcmeOptions


def acme(
    options: AcmeOptions,
    loaded: LoadedConfig,
    graph: Graph,
) -> Sequence[str]:
    """Say what generators and trainers do at the same time; called when a configuration is validated."""
    if loaded.config.rollout.max_staleness == 0:
        return ["rollouts and updates take turns: rollout.max_staleness is 0"]
    lines = ["while a step trains, the rollouts of the next are made; the weight sync waits for them"]
    if options.first_steps:
        lines.append(f"in the first {options.first_steps} steps, rollouts and updates take turns")
    return lines
