"""One line of ``chatlearn plugins list``: a record, its origin, and whether it is usable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from chatlearn_core.plugins.records import Kind, PluginRecord

Status = Literal["ok", "failed", "incompatible", "conflict", "disabled", "missing-engine"]
"""``failed``: the plugin cannot be imported, its hook raised, or the returned record breaks a rule; ``incompatible``:
it was written for another plugin API or another version of the core; ``conflict``: another plugin registers the same
kind and name; ``disabled``: by ``CHATLEARN_DISABLE_PLUGINS``; ``missing-engine``: a required engine is not
installed."""


@dataclass(slots=True, frozen=True, kw_only=True)
class PluginEntry:
    """A registered plugin, or the reason why there is none."""

    name: str
    """The record's name; without a record, the entry point's."""
    kind: Kind | None
    """None if the plugin failed before it returned a record."""
    distribution: str
    version: str
    status: Status
    reason: str = ""
    """Why the status is not ``ok``."""
    record: PluginRecord | None = None

    @property
    def origin(self) -> str:
        """Distribution and version, as shown in errors."""
        return f"{self.distribution} {self.version}".rstrip()

    @property
    def title(self) -> str:
        """Name and origin: ``vllm (chatlearn-vllm 0.1.0)``."""
        return f"{self.name} ({self.origin})"
