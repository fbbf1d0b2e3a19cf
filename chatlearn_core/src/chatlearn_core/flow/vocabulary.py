"""The calls available to flows and the outputs that trainers compute, as registered by the installed plugins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chatlearn_core.plugins import builtin
from chatlearn_core.plugins.import_string import resolve_import_string
from chatlearn_core.plugins.records import FlowMethodSpec, OutputSpec

if TYPE_CHECKING:
    from pydantic import BaseModel

    from chatlearn_core.plugins.registry import PluginRegistry


@dataclass(slots=True, frozen=True)
class FlowVocabulary:
    """The methods and outputs that flows can use."""

    methods: Mapping[str, FlowMethodSpec]
    """Kind of role and method, such as ``trainer.logprobs`` -> record."""
    outputs: Mapping[str, OutputSpec]
    load_arguments: Callable[[FlowMethodSpec], type[BaseModel]]
    """Imports the pydantic model of a method's arguments."""

    @classmethod
    def of(cls, registry: PluginRegistry) -> FlowVocabulary:
        """Everything that the plugins of a process register."""
        return cls(
            {record.name: record for record in registry.records("flow_method")},
            registry.outputs,
            lambda method: registry.load_options(method, "arguments"),
        )

    @classmethod
    def builtin(cls) -> FlowVocabulary:
        """The vocabulary that the core alone registers."""

        def load(method: FlowMethodSpec) -> Any:
            return resolve_import_string(method.arguments)

        return cls(
            {record.name: record for record in builtin.chatlearn_flow_methods()},
            {record.name: record for record in builtin.chatlearn_outputs()},
            load,
        )

    def methods_of(self, kind: str) -> dict[str, FlowMethodSpec]:
        """The methods of roles of one kind, by their name in flows."""
        return {record.method: record for record in self.methods.values() if record.role_kind == kind}
