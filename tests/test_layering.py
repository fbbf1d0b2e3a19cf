"""The import contracts hold, and modules that must be cheap to import are."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = {"torch", "transformers", "numpy", "ray", "vllm", "sglang", "deepspeed", "megatron", "datasets", "pyarrow"}


def imported_by(code: str, environment: dict[str, str]) -> set[str]:
    """Top-level modules in memory after ``code``."""
    report = "; import sys, json; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    finished = subprocess.run(
        [sys.executable, "-c", code + report], env=environment, capture_output=True, text=True, check=True
    )
    return set(json.loads(finished.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "code",
    [
        "import chatlearn_core.plugins, chatlearn_core.plugins.records",
        "from chatlearn_core.plugins.loader import discover_plugins; discover_plugins()",
        "from chatlearn_cli.main import app",
    ],
)
def test_finding_plugins_imports_no_engine(code: str, environment: dict[str, str]) -> None:
    plain = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    assert imported_by(code, plain) & HEAVY == set()


@pytest.mark.parametrize("command", ["plugins list", "plugins list --json", "--help", "run --help"])
def test_light_commands_import_no_engine(command: str, environment: dict[str, str]) -> None:
    code = (
        "import contextlib, sys\nfrom chatlearn_cli.main import main\n"
        f"with contextlib.suppress(SystemExit): main({command.split()!r})\nNone"
    )
    plain = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    assert imported_by(code, plain) & HEAVY == set()


def test_options_modules_import_no_engine(environment: dict[str, str]) -> None:
    code = (
        "from chatlearn_core.plugins.loader import discover_plugins\n"
        "registry = discover_plugins()\n"
        "for entry in registry.entries:\n"
        "    assert entry.status in ('ok', 'missing-engine'), entry\n"
        "    if getattr(entry.record, 'options', None): registry.load_options(entry.record)\n"
        "None"
    )
    plain = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    assert imported_by(code, plain) & HEAVY == set()


@pytest.mark.slow
def test_import_contracts_hold() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    finished = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout[-4000:]


def test_every_distribution_has_the_same_shape() -> None:
    projects = [file.parent for file in ROOT.glob("*/pyproject.toml")] + [
        file.parent for file in ROOT.glob("plugins/*/pyproject.toml") if file.parent.name != "template"
    ]
    assert len(projects) >= 9
    for project in projects:
        assert (project / "README.md").is_file(), project
        assert (project / "tests").is_dir(), project
        [package] = [path for path in (project / "src").iterdir() if path.is_dir()]
        assert package.name == project.name
        assert (package / "py.typed").is_file(), project


def test_the_contracts_name_every_distribution() -> None:
    """A new distribution that no contract names could import anything."""
    ours = {
        file.parent.name for file in [*ROOT.glob("chatlearn_*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml")]
    }
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    contracts = {contract["id"]: contract for contract in settings["contracts"]}
    assert set(settings["root_packages"]) == ours
    of_the_core = {"chatlearn_config", "chatlearn_core", "chatlearn_trial"}
    assert ours - set(contracts["no-engines"]["forbidden_modules"]) == of_the_core
    assert ours - set(contracts["kit"]["source_modules"]) == {"chatlearn_core", "chatlearn_testing"}
    libraries = {"chatlearn_config", "chatlearn_core", "chatlearn_hosting", "chatlearn_testing", "chatlearn_trial"}
    assert ours - set(contracts["kit-apart"]["forbidden_modules"]) == libraries
