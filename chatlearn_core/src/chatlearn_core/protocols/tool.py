"""Tools: what a policy calls during a rollout, and where tools come from."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

TOOL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
"""Names that chat templates and models take."""


class ToolError(Exception):
    """A call failed for a reason that the model is told; the call is not repeated.

    Functions that are tools may raise it, too.
    """


@dataclass(slots=True, frozen=True)
class Tool:
    """One tool that the policy can call."""

    name: str
    """Matches ``TOOL_NAME``."""
    description: str
    parameters: Mapping[str, Any]
    """JSON Schema of the arguments, which are an object."""
    run: Callable[[Mapping[str, Any]], Awaitable[str]]
    """Answers a call with text. The arguments fit the schema and must not be changed. Many calls run at once on one
    event loop, which must stay free. Any exception is shown to the model as an error; ``ToolError`` is never repeated.
    """

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@runtime_checkable
class ToolSource(Protocol):
    """Provides tools while it is open."""

    def __init__(self, options: Any) -> None:
        """Store the options; open nothing yet.

        Called: when an environment with this source is built; in each worker of the environment; once.
        """

    def open(self) -> Sequence[Tool]:
        """Load what the tools need, and return them.

        Called: before any rollout, outside an event loop; in each worker of the environment; at most once.

        Raises:
            ConfigError: the options name something that is missing or wrong.
            BackendError: a server does not start.
        """

    def close(self) -> None:
        """Release everything. Safe to call twice, and without ``open``.

        Called: last, also after a failed ``open``; in each worker of the environment; once or twice.
        """
