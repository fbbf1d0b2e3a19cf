"""The input of rules between settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from chatlearn_config.problems import KeyPath, Problem
from chatlearn_core.config.choices import Choices
from chatlearn_core.config.models import ModelConfig, RoleConfig, RunConfig
from chatlearn_core.plugins.records import AlgorithmSpec, PluginRecord, WeightSyncSpec

RecordT = TypeVar("RecordT", bound=PluginRecord)


@dataclass(slots=True, frozen=True)
class Checked:
    """What rules look at."""

    config: RunConfig
    choices: Choices
    """The selected plugins; one that could not be selected is absent, and rules about it report nothing."""
    transports: tuple[WeightSyncSpec, ...] = ()
    """All installed transports, from which ``weight_sync.backend: auto`` can choose."""

    def roles(self, kind: str) -> Iterator[tuple[str, RoleConfig]]:
        """The roles of one kind."""
        return ((name, role) for name, role in self.config.roles.items() if role.kind == kind)

    @property
    def algorithm_roles(self) -> tuple[tuple[str, str], ...] | None:
        """(name, kind) of the roles that the algorithm calls, from its record or else its options; None without an
        algorithm.
        """
        choice = self.choices.selected.get("algorithm")
        record = self.record("algorithm", AlgorithmSpec)
        if record is None:
            return None
        by_options: tuple[tuple[str, str], ...] = getattr(choice.options if choice else None, "required_roles", ())
        return record.roles or by_options

    def model_of(self, name: str) -> tuple[KeyPath, ModelConfig]:
        """The model of a role, and the path where it is configured."""
        own = self.config.roles[name].model
        return (("model",), self.config.model) if own is None else (("roles", name, "model"), own)

    def record(self, key: str, record_type: type[RecordT]) -> RecordT | None:
        """The record of the plugin chosen at ``key`` (such as ``roles.trainer``); None without one."""
        record = self.choices.records.get(key)
        return record if isinstance(record, record_type) else None


Rule = Callable[[Checked], Iterator[Problem]]
Related = tuple[tuple[KeyPath, Any], ...]
"""Other settings involved in a conflict, with their values."""
