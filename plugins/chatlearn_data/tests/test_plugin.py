"""What the distribution registers."""

from __future__ import annotations

import subprocess
import sys

from chatlearn_core.plugins.loader import discover_plugins


def test_everything_is_discovered_and_can_be_imported() -> None:
    plugins = discover_plugins()
    specs = {spec.name: spec for spec in plugins.records("dataset")}
    assert {"verifiable", "prompt", "keys", "sft", "messages", "gsm8k", "math", "parquet", "hub"} <= specs.keys()
    for spec in specs.values():
        options = plugins.load_options(spec)()
        assert hasattr(plugins.load_factory(spec)(options), "rows" if spec.reads else "parse")
    assert "data" in {spec.name for spec in plugins.records("cli_command")}


def test_registering_imports_nothing_heavy() -> None:
    program = (
        "import sys, chatlearn_data.plugin as p; list(p.chatlearn_datasets()); list(p.chatlearn_cli_commands());"
        "print(sorted({'torch', 'numpy', 'pyarrow', 'datasets', 'pydantic', 'typer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
