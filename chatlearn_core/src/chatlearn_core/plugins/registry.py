"""The result of loading plugins: usable records, failures with their reasons, and observers of runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, overload

from chatlearn_core.plugins import select
from chatlearn_core.plugins.entry import PluginEntry
from chatlearn_core.plugins.observers import Observers
from chatlearn_core.plugins.records import (
    AggregationSpec,
    CliCommandSpec,
    DatasetSpec,
    ExampleKindSpec,
    FlowMethodSpec,
    Kind,
    LauncherSpec,
    ModelFamilySpec,
    OutputSpec,
    PluginRecord,
    RuntimeSpec,
    ToolSpec,
    WeightSyncSpec,
)
from chatlearn_core.plugins.requirements import InstalledVersion, installed_here

if TYPE_CHECKING:
    from pydantic import BaseModel


@dataclass(slots=True, frozen=True)
class PluginRegistry:
    """The plugins of this process, in order of kind, name and distribution."""

    entries: tuple[PluginEntry, ...] = ()
    observers: Observers = field(default_factory=Observers)
    warnings: tuple[str, ...] = ()
    """Oddities that are no plugin's fault, such as a disabled distribution that is not installed."""

    @overload
    def records(self, kind: Literal["weight_sync"]) -> tuple[WeightSyncSpec, ...]: ...
    @overload
    def records(self, kind: Literal["dataset"]) -> tuple[DatasetSpec, ...]: ...
    @overload
    def records(self, kind: Literal["model_family"]) -> tuple[ModelFamilySpec, ...]: ...
    @overload
    def records(self, kind: Literal["cli_command"]) -> tuple[CliCommandSpec, ...]: ...
    @overload
    def records(self, kind: Literal["launcher"]) -> tuple[LauncherSpec, ...]: ...
    @overload
    def records(self, kind: Literal["output"]) -> tuple[OutputSpec, ...]: ...
    @overload
    def records(self, kind: Literal["flow_method"]) -> tuple[FlowMethodSpec, ...]: ...
    @overload
    def records(self, kind: Kind) -> tuple[PluginRecord, ...]: ...
    def records(self, kind: Kind) -> tuple[PluginRecord, ...]:
        """The records of one kind that a run can select, sorted by name."""
        return tuple(
            entry.record
            for entry in self.entries
            if entry.kind == kind and entry.status == "ok" and entry.record is not None
        )

    @overload
    def select(
        self, kind: Literal["weight_sync"], name: str, where: str = "", *, installed: InstalledVersion | None = ...
    ) -> WeightSyncSpec: ...
    @overload
    def select(
        self, kind: Literal["dataset"], name: str, where: str = "", *, installed: InstalledVersion | None = ...
    ) -> DatasetSpec: ...
    @overload
    def select(
        self, kind: Literal["example_kind"], name: str, where: str = "", *, installed: InstalledVersion | None = ...
    ) -> ExampleKindSpec: ...
    @overload
    def select(
        self, kind: Literal["runtime"], name: str, where: str = "", *, installed: InstalledVersion | None = ...
    ) -> RuntimeSpec: ...
    @overload
    def select(
        self, kind: Literal["launcher"], name: str, where: str = "", *, installed: InstalledVersion | None = ...
    ) -> LauncherSpec: ...
    @overload
    def select(
        self, kind: Literal["tool"], name: str, where: str = "", *, installed: InstalledVersion | None = ...
    ) -> ToolSpec: ...
    @overload
    def select(
        self, kind: Literal["model_family"], name: str, where: str = "", *, installed: InstalledVersion | None = ...
    ) -> ModelFamilySpec: ...
    @overload
    def select(
        self, kind: Literal["cli_command"], name: str, where: str = "", *, installed: InstalledVersion | None = ...
    ) -> CliCommandSpec: ...
    @overload
    def select(
        self, kind: Literal["aggregation"], name: str, where: str = "", *, installed: InstalledVersion | None = ...
    ) -> AggregationSpec: ...
    @overload
    def select(
        self, kind: Kind, name: str, where: str = "", *, installed: InstalledVersion | None = ...
    ) -> PluginRecord: ...
    def select(
        self, kind: Kind, name: str, where: str = "", *, installed: InstalledVersion | None = installed_here
    ) -> PluginRecord:
        """The record that a configuration names.

        Args:
            where: file and key that name it, such as ``configs/run.yaml, roles.generator.backend``.
            installed: looks up engines in the interpreter that will host the backend
                (``requirements.installed_in(python)`` for another interpreter); None: engines are not checked.

        Raises:
            PluginNotFoundError: there is no such plugin, or it failed to load.
            PluginConflictError: several distributions register it; none is preferred.
            PluginIncompatibleError: it is for another plugin API, or its engine is missing or has the wrong version.
        """
        record = select.select_entry(self.entries, kind, name, where, installed).record
        assert record is not None
        return record

    def origin(self, record: PluginRecord) -> str:
        """Distribution and version that registered a record."""
        for entry in self.entries:
            if entry.kind == record.kind and entry.name == record.name and entry.record is not None:
                return entry.origin
        return "not registered by any distribution"

    def load_factory(self, record: PluginRecord, attribute: str = "factory") -> Callable[..., Any]:
        """Import a record's code: ``factory``, or a transport's ``sender`` and ``receiver``, or a command's ``app``.

        The returned callable raises PluginError if the code calls ``sys.exit``.

        Raises:
            PluginError: the import fails or yields something that is not callable; names plugin, version and cause.
        """
        return select.load_factory(record, attribute, self.origin(record))

    @property
    def outputs(self) -> dict[str, OutputSpec]:
        """The outputs that trainers may be asked to compute, by name."""
        return {record.name: record for record in self.records("output")}

    def load_options(self, record: PluginRecord, attribute: str = "options") -> type[BaseModel]:
        """Import the pydantic model of a record's options, or of a flow method's ``arguments``.

        Raises:
            PluginError: the import fails or yields no pydantic model; names plugin, version and cause.
        """
        return select.load_model(record, self.origin(record), attribute)
