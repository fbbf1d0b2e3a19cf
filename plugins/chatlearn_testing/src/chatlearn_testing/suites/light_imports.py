"""The contract of what is imported when plugins are listed and configurations are checked: nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata

from chatlearn_core.plugins.markers import PROJECT
from chatlearn_testing.suites.conformance_suite import ConformanceSuite, installed_plugins

HEAVY = (
    "torch",
    "transformers",
    "tokenizers",
    "datasets",
    "jax",
    "tensorflow",
    "vllm",
    "sglang",
    "megatron",
    "deepspeed",
    "ray",
)
"""Packages that take seconds to import, or need an engine."""
IMPORT = """
import importlib, json, sys
path, modules, heavy = json.loads(sys.stdin.read())
sys.path[:] = path
for module in modules:
    importlib.import_module(module)
    found = [name for name in heavy if name in sys.modules]
    if found:
        sys.exit(f"{module} imports {', '.join(found)}")
"""


class LightImports(ConformanceSuite):
    """Contract tests of the modules that are imported before a run selects the plugin."""

    def test_nothing_heavy_is_imported_before_a_run(self) -> None:
        """The module of the options, and the one in the entry point if the plugin is installed, import no torch, no
        transformers and no engine: both are loaded whenever plugins are listed or a configuration is checked.

        Import such packages in the module of the factory.
        """
        record = self.record()
        owners = [entry.distribution for entry in installed_plugins().entries if entry.record == record]
        points = [point for owner in owners for point in metadata.distribution(owner).entry_points]
        modules = [point.module for point in points if point.group == PROJECT]
        modules.append(record.options.partition(":")[0])
        finished = subprocess.run(
            [sys.executable, "-P", "-c", IMPORT],
            input=json.dumps([sys.path, modules, HEAVY]),
            capture_output=True,
            text=True,
            timeout=self.patience_s,
            check=False,
        )
        assert finished.returncode == 0, finished.stderr.strip()[-500:]
