"""Registers the reward ``acme``. Imports no torch: this module is loaded whenever plugins are listed."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import RewardSpec


@hookimpl
def chatlearn_rewards() -> Iterable[RewardSpec]:
    """The reward of this distribution."""
    return [
        RewardSpec(
            name="acme",
            summary="Keywords covered, less a penalty for length.",
            factory="acme_plugin.reward:AcmeReward",
            options="acme_plugin.options:AcmeOptions",
            unit="sample",
        )
    ]
