"""What the distribution registers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from chatlearn_core.exceptions import PluginIncompatibleError
from chatlearn_core.plugins.loader import discover_plugins


def test_loggers_and_commands_are_discovered() -> None:
    plugins = discover_plugins()
    # Found whether or not their libraries are installed here.
    specs = {entry.name: entry.record for entry in plugins.entries if entry.kind == "logger"}
    assert {"tensorboard", "wandb"} <= specs.keys()
    assert {"report", "flow", "plugins matrix"} <= {spec.name for spec in plugins.records("cli_command")}
    for name in ("tensorboard", "wandb"):
        plugins.load_options(specs[name])()


@pytest.mark.parametrize(("name", "too_old"), [("tensorboard", "2.16.0"), ("wandb", "0.17.9")])
def test_a_logger_whose_library_is_missing_or_too_old_is_refused_by_name(name: str, too_old: str) -> None:
    for version in (None, too_old):
        with pytest.raises(PluginIncompatibleError, match=f"needs {name}"):
            discover_plugins().select("logger", name, "run.yaml, log.loggers[0]", installed=lambda _, v=version: v)


def test_registering_imports_nothing_heavy() -> None:
    program = (
        "import sys, chatlearn_observe.plugin as p; list(p.chatlearn_loggers()); list(p.chatlearn_cli_commands());"
        "print(sorted({'torch', 'jinja2', 'yaml', 'tensorboard', 'wandb', 'pydantic', 'typer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
