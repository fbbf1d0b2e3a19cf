from __future__ import annotations

from dataclasses import replace

import pytest

from chatlearn_core.config.choices import PLUGINS
from chatlearn_core.exceptions import PluginIncompatibleError, PluginNotFoundError
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.protocols import RoleContext
from chatlearn_workers.worker_spec import PluginChoice, WorkerSpec, minor


@pytest.fixture
def choice(fakes: PluginRegistry) -> PluginChoice:
    record = fakes.select("generator", "echo")
    return PluginChoice.of(fakes, record, fakes.load_options(record)(delay_s=2.0), "roles.generator")


def test_a_worker_finds_the_plugin_by_name(choice: PluginChoice, fakes: PluginRegistry) -> None:
    record, options = choice.find(fakes, "driver-host")
    assert (record.kind, record.name) == ("generator", "echo")
    assert options.delay_s == 2.0


def test_another_version_on_the_worker_is_an_error_that_names_both(choice: PluginChoice, fakes: PluginRegistry) -> None:
    newer = tuple(replace(e, version="2.5") if e.distribution == choice.distribution else e for e in fakes.entries)
    with pytest.raises(PluginIncompatibleError) as error:
        choice.find(replace(fakes, entries=newer), "driver-host")
    assert "chatlearn_ray_test_backends 1.0 on the driver (driver-host)" in str(error.value)
    assert "but chatlearn_ray_test_backends 2.5 on worker" in str(error.value)
    assert "roles.generator" in str(error.value)


def test_a_worker_without_the_plugin_says_where_it_is_missing(choice: PluginChoice, fakes: PluginRegistry) -> None:
    fewer = tuple(e for e in fakes.entries if e.distribution != choice.distribution)
    with pytest.raises(PluginNotFoundError, match=r"roles\.generator, on worker"):
        choice.find(replace(fakes, entries=fewer), "driver-host")


def test_another_core_or_python_is_an_error() -> None:
    spec = WorkerSpec("reward", RoleContext("reward"), 1.0, driver_host="driver-host")
    spec.check_versions()
    with pytest.raises(PluginIncompatibleError, match=r"chatlearn-core is 9\.9 on the driver"):
        replace(spec, core_version="9.9").check_versions()
    with pytest.raises(PluginIncompatibleError, match=r"Python is 3\.99 on the driver"):
        replace(spec, python_version="3.99.1").check_versions()


def test_minor() -> None:
    assert minor("3.11.4") == "3.11"


def test_options_that_name_plugins_find_those_of_the_worker(fakes: PluginRegistry) -> None:
    """A tool that only this registry has."""
    [calculator] = [e for e in fakes.entries if (e.kind, e.name) == ("tool", "calculator")]
    assert calculator.record is not None
    acme = replace(calculator, name="acme", record=replace(calculator.record, name="acme"))
    registry = replace(fakes, entries=(*fakes.entries, acme))
    record = registry.select("environment", "tools")
    options = registry.load_options(record).model_validate({"tools": ["acme"]}, context={PLUGINS: registry})
    _, found = PluginChoice.of(registry, record, options, "roles.helper").find(registry, "driver-host")
    assert found == options
