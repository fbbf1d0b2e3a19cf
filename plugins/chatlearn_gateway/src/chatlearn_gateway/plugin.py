"""Registers the environment of this distribution."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import EnvironmentSpec


@hookimpl
def chatlearn_environments() -> Iterable[EnvironmentSpec]:
    """``agent``."""
    return [
        EnvironmentSpec(
            name="agent",
            summary="Runs a black-box agent against an OpenAI- and Anthropic-compatible server, and records its turns.",
            factory="chatlearn_gateway.environment:AgentEnvironment",
            options="chatlearn_gateway.options:AgentOptions",
            more_uses=True,
        )
    ]
