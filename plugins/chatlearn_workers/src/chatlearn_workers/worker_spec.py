"""The driver's description of a worker, and how the worker finds its plugin among its own."""

from __future__ import annotations

import platform
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from chatlearn_core import __version__ as core_version
from chatlearn_core.config.choices import PLUGINS
from chatlearn_core.exceptions import PluginIncompatibleError
from chatlearn_core.plugins.records import Kind, PluginRecord
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.plugins.requirements import installed_where
from chatlearn_core.protocols import RoleContext
from chatlearn_core.runtime.plan import RewardGate, UsedRole
from chatlearn_runtime_kit.environments import EnvironmentRole


@dataclass(slots=True, frozen=True)
class PluginChoice:
    """A plugin by the driver's name for it. No class is sent: the worker imports its own."""

    kind: Kind
    name: str
    distribution: str
    version: str
    options: Mapping[str, Any]
    key: str
    """Key where the configuration chose it, such as ``roles.trainer``."""

    @staticmethod
    def of(registry: PluginRegistry, record: PluginRecord, options: BaseModel, key: str) -> PluginChoice:
        """The driver's choice: a record with validated options."""
        entry = next(e for e in registry.entries if e.record is record or (e.record is not None and e.record == record))
        return PluginChoice(record.kind, record.name, entry.distribution, entry.version, options.model_dump(), key)

    def find(self, registry: PluginRegistry, driver_host: str) -> tuple[PluginRecord, BaseModel]:
        """The worker's record with that name, and the options.

        Raises:
            PluginNotFoundError: this interpreter has no such plugin.
            PluginIncompatibleError: its version differs from the driver's.
        """
        where = f"{self.key}, on {worker_place()}"
        declared = registry.select(self.kind, self.name, where, installed=None)
        record = registry.select(self.kind, self.name, where, installed=installed_where(declared, self.options))
        entry = next(e for e in registry.entries if e.record is record)
        if (entry.distribution, entry.version) != (self.distribution, self.version):
            raise PluginIncompatibleError(
                f"{self.key}: {self.kind} {self.name!r} is {self.distribution} {self.version} on the driver "
                f"({driver_host}), but {entry.distribution} {entry.version} on {worker_place()}. Install one "
                "version on every node"
            )
        return record, registry.load_options(record).model_validate(dict(self.options), context={PLUGINS: registry})


@dataclass(slots=True, frozen=True)
class RewardShare:
    """One part of a reward role."""

    name: str
    plugin: PluginChoice
    weight: float
    data_sources: frozenset[str] | None
    unit: Literal["sample", "group"]
    uses: Mapping[str, UsedRole] = field(default_factory=dict)
    """Handle -> the role that the reward calls by it."""
    gate: RewardGate | None = None


@dataclass(slots=True, frozen=True)
class WorkerSpec:
    """One worker: a rank of a trainer, a replica of a generator, a reward worker or an environment worker."""

    kind: str
    context: RoleContext
    """Its device is as configured (``auto``): the worker resolves it."""
    timeout_s: float
    plugin: PluginChoice | None = None
    """For a trainer, a generator or an environment."""
    shares: tuple[RewardShare, ...] = ()
    """For a reward."""
    environment: EnvironmentRole | None = None
    """For an environment."""
    num_threads: int | None = None
    driver_host: str = ""
    core_version: str = core_version
    python_version: str = platform.python_version()

    def check_versions(self) -> None:
        """Raises PluginIncompatibleError if driver and worker have different versions of core or Python
        (major.minor)."""
        pairs = (
            ("chatlearn-core", self.core_version, core_version),
            ("Python", minor(self.python_version), minor(platform.python_version())),
        )
        for what, ours, theirs in pairs:
            if ours != theirs:
                raise PluginIncompatibleError(
                    f"{what} is {ours} on the driver ({self.driver_host}), but {theirs} on {worker_place()}. Install "
                    "one version on every node"
                )


def minor(version: str) -> str:
    """``3.11.4`` to ``3.11``."""
    return ".".join(version.split(".")[:2])


def worker_place() -> str:
    """Host and interpreter of this process, for messages."""
    return f"worker {socket.gethostname()} ({sys.executable})"
