"""What a tool is: a name and a schema for the model, and a coroutine function that answers a call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class ToolError(Exception):
    """A call failed for a reason that the model is told; the call is not repeated.

    Functions that are tools may raise it, too.
    """


@dataclass(slots=True, frozen=True)
class Tool:
    """One tool that the policy can call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON Schema of the arguments, which are an object."""
    run: Callable[[Mapping[str, Any]], Awaitable[str]]
    """Answers a call with text. Any exception is shown to the model as an error; ``ToolError`` is never repeated."""

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


class ToolSource(Protocol):
    """Provides tools while it is open."""

    def open(self) -> Sequence[Tool]:
        """Load what the tools need, and return them. Called once, outside any rollout.

        Raises:
            ConfigError: the options name something that is missing or wrong.
            BackendError: a server does not start.
        """

    def close(self) -> None:
        """Release everything. Safe to call twice, and without ``open``."""
