"""Edits of a plugin's source, as an author might make them, and how to write and run the edited package."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import chatlearn_testing
from chatlearn_core.plugins.records import Kind
from chatlearn_testing.check import suite_class
from chatlearn_testing.suites.conformance_suite import ConformanceSuite

TEMPLATES = Path(chatlearn_testing.__file__).parent / "template"
TEMPLATE = "acme_plugin"
"""Package of every template."""
HOOKS: Mapping[str, str] = {
    "aggregation": "chatlearn_aggregations",
    "algorithm": "chatlearn_algorithms",
    "cli_command": "chatlearn_cli_commands",
    "dataset": "chatlearn_datasets",
    "environment": "chatlearn_environments",
    "example_kind": "chatlearn_example_kinds",
    "flow_method": "chatlearn_flow_methods",
    "generator": "chatlearn_generators",
    "launcher": "chatlearn_launchers",
    "logger": "chatlearn_loggers",
    "model_family": "chatlearn_model_families",
    "output": "chatlearn_outputs",
    "reader": "chatlearn_datasets",
    "reward": "chatlearn_rewards",
    "rollout_mode": "chatlearn_rollout_modes",
    "runtime": "chatlearn_runtimes",
    "sample_filter": "chatlearn_sample_filters",
    "sampler": "chatlearn_samplers",
    "tool": "chatlearn_tools",
    "schedule": "chatlearn_schedules",
    "step_policy": "chatlearn_step_policies",
    "trainer": "chatlearn_trainers",
    "weight_sync": "chatlearn_weight_syncs",
}
"""Hook that registers each kind which has mutants; readers of files are datasets with a template of their own."""
IMPORTS = """from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import multiprocessing.shared_memory
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from chatlearn_core.exceptions import CheckpointError, DataError
from chatlearn_core.types import RewardResult, WeightShard

KEPT = []
"""
"""Added to an edited module, because an author who makes the fault would import what it needs."""


@dataclass(slots=True, frozen=True)
class SourceMutant:
    """One fault, as edits of one module of a plugin."""

    kind: Kind | Literal["reader"]
    name: str
    file: str
    """Module of the package."""
    old: str
    """Text that occurs once in the file."""
    new: str
    caught_by: str
    """The contract test that fails; others may fail, too."""
    also: tuple[tuple[str, str], ...] = ()
    """Further edits of the same file, where one alone changes nothing that can be seen."""
    package: str = TEMPLATE
    """Package that is edited: the template's, or that of a plugin on a real engine."""
    equivalent: str = ""
    """Why no caller can see the fault; empty: a suite that passes it has a gap."""

    @property
    def id(self) -> str:
        """Unique among all mutants."""
        base = "" if self.package == TEMPLATE else f"{self.package.removeprefix('chatlearn_')}-"
        return f"{self.kind}-{base}{self.name}"


def write_mutant(mutant: SourceMutant, package: Path) -> None:
    """Edit a copy of the package.

    Raises:
        ValueError: a text to replace is not there exactly once.
    """
    file = package / mutant.file
    source = file.read_text(encoding="utf-8")
    for old, new in ((mutant.old, mutant.new), *mutant.also):
        if source.count(old) != 1:
            raise ValueError(f"{mutant.id}: {old!r} is there {source.count(old)} times in {mutant.file}")
        source = source.replace(old, new)
    if mutant.file != "plugin.py":
        source = source.replace("from __future__ import annotations\n", IMPORTS, 1)
    file.write_text(source, encoding="utf-8")


def source_of(kind: str, package: str) -> Path:
    """Return the folder with the original package."""
    if package == TEMPLATE:
        return TEMPLATES / kind / "src" / TEMPLATE
    found = importlib.util.find_spec(package)
    assert found is not None, f"{package} is not installed"
    assert found.origin is not None, f"{package} has no folder"
    return Path(found.origin).parent


def suite_of(
    kind: str, package: str, model_directory: Path, preferred: Mapping[str, Any] | None = None
) -> tuple[str, type[ConformanceSuite]]:
    """Build the suite of an imported package, with the settings of its module ``conformance``, if it has one.

    Args:
        kind: kind of the template.
        package: the package, already edited and first on ``sys.path``.
        model_directory: where a model is built, unless it is there.
        preferred: settings that win over those of the package.
    """
    records = getattr(importlib.import_module(f"{package}.plugin"), HOOKS[kind])()
    record = _only(records)
    key = f"{record.kind}/{record.name}"
    settings: dict[str, Any] = {}
    if importlib.util.find_spec(f"{package}.conformance") is not None:
        found = importlib.import_module(f"{package}.conformance")
        settings = dict(found.SETTINGS.get(key, {}))
    settings |= dict(preferred or {})
    reference, build = settings.pop("load_reference", None), settings.pop("build_model", None)
    model = model_directory if build or model_directory.exists() else None
    if build and not model_directory.exists():
        module, _, name = build.partition(":")
        getattr(importlib.import_module(module), name)(model_directory)
    return key, suite_class(record, model_directory=model, load_reference=reference, settings=settings)


def _only(records: Iterable[Any]) -> Any:
    [record] = records
    return record
