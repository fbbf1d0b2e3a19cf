from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from chatlearn_cli.plugins import app
from chatlearn_core.exceptions import PluginError
from chatlearn_testing.scaffold import TEMPLATE_KINDS


def test_new_writes_a_package_and_says_how_to_go_on(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["new", "zed-reward", "--kind", "reward", "--directory", str(tmp_path)])
    assert done.exit_code == 0, done.output
    root = tmp_path / "zed-reward"
    assert done.output.splitlines()[0] == f"wrote 10 files of the reward 'zed' to {root}"
    assert "chatlearn plugins check zed-reward" in done.output
    assert {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()} == {
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "src/zed_reward/__init__.py",
        "src/zed_reward/conformance.py",
        "src/zed_reward/options.py",
        "src/zed_reward/plugin.py",
        "src/zed_reward/py.typed",
        "src/zed_reward/reward.py",
        "tests/test_reward.py",
    }


def test_a_relative_path_is_shown_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["new", "zed-reward", "--kind", "reward"])
    assert "pip install -e './zed-reward[testing]'" in done.output
    assert tmp_path.joinpath("zed-reward/pyproject.toml").is_file()


def test_an_unknown_kind_names_those_that_there_are(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["new", "zed", "--kind", "rewards", "--directory", str(tmp_path)])
    assert done.exit_code == 2
    assert all(kind in done.output for kind in TEMPLATE_KINDS)
    assert list(tmp_path.iterdir()) == []


def test_errors_are_those_of_the_scaffold(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["new", "chatlearn-core", "--kind", "reward", "--directory", str(tmp_path)])
    with pytest.raises(PluginError, match="taken"):
        raise done.exception or AssertionError(done.output)
