"""What the distribution registers."""

from __future__ import annotations

import subprocess
import sys

from chatlearn_core.plugins.loader import discover_plugins


def test_the_commands_are_discovered_and_can_be_imported() -> None:
    plugins = discover_plugins()
    ours = [entry for entry in plugins.entries if entry.distribution == "chatlearn-testing"]
    assert [(entry.kind, entry.name, entry.status) for entry in ours] == [
        ("cli_command", "plugins check", "ok"),
        ("cli_command", "plugins new", "ok"),
    ]
    for entry in ours:
        assert entry.record is not None
        assert callable(plugins.load_factory(entry.record, "app"))


def test_registering_imports_nothing_heavy() -> None:
    program = (
        "import sys, chatlearn_testing.plugin as p; list(p.chatlearn_cli_commands());"
        "print(sorted({'torch', 'pytest', 'numpy', 'pydantic', 'typer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
