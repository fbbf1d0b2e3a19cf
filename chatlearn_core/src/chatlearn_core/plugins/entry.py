"""One line of ``chatlearn plugins list``: a record with its origin and whether it can be used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from chatlearn_core.plugins.records import Kind, PluginRecord

Status = Literal["ok", "failed", "incompatible", "conflict", "disabled", "missing-engine"]
"""``failed``: it cannot be imported, its hook raised, or what it returned breaks a rule; ``incompatible``: written for
another plugin API or another version of the core; ``conflict``: another one registers the same kind and name;
``disabled``: by ``CHATLEARN_DISABLE_PLUGINS``; ``missing-engine``: what it requires is not installed here."""


@dataclass(slots=True, frozen=True, kw_only=True)
class PluginEntry:
    """A registered plugin, or the reason why there is none."""

    name: str
    """The record's name; the entry point's where there is no record."""
    kind: Kind | None
    """None where the plugin failed before it could say."""
    distribution: str
    version: str
    status: Status
    reason: str = ""
    """Why the status is not ``ok``."""
    record: PluginRecord | None = None

    @property
    def origin(self) -> str:
        """Distribution and version, as errors name them."""
        return f"{self.distribution} {self.version}".rstrip()

    @property
    def title(self) -> str:
        """Name and origin: ``vllm (chatlearn-vllm 0.1.0)``."""
        return f"{self.name} ({self.origin})"
