"""The contract of what is imported when plugins are listed and configurations are checked: nothing heavy."""

from __future__ import annotations

from importlib import metadata

from chatlearn_core.plugins.markers import PROJECT
from chatlearn_testing.child_python import HEAVY, assert_imports_none_of
from chatlearn_testing.suites.conformance_suite import ConformanceSuite, installed_plugins


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
        assert_imports_none_of(HEAVY, modules, self.patience_s)
