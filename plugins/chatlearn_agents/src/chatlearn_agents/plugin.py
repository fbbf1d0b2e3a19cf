"""Registers the environments of this distribution."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import EnvironmentSpec


@hookimpl
def chatlearn_environments() -> Iterable[EnvironmentSpec]:
    """``tools``, ``correction`` and ``game``."""
    return [
        EnvironmentSpec(
            name="tools",
            summary="Runs the tool calls that the policy writes, and shows it their results, over several turns.",
            factory="chatlearn_agents.tool_environment:ToolEnvironment",
            options="chatlearn_agents.options:ToolsOptions",
        ),
        EnvironmentSpec(
            name="correction",
            summary="Tells the policy that its answer is wrong, lets it try again, and rewards a right one.",
            factory="chatlearn_agents.correction_environment:CorrectionEnvironment",
            options="chatlearn_agents.options:CorrectionOptions",
        ),
        EnvironmentSpec(
            name="game",
            summary="Plays a game with the interface of Gymnasium or OpenEnv: observations and actions are texts.",
            factory="chatlearn_agents.game_environment:GameEnvironment",
            options="chatlearn_agents.options:GameOptions",
        ),
    ]
