from __future__ import annotations

import pytest

COMMANDS = """
from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import CliCommandSpec

@hookimpl
def chatlearn_cli_commands():
    return [
        CliCommandSpec(name="acme", app="acme_cli:app", help="Work with Acme."),
        CliCommandSpec(name="weigh", app="acme_cli:weigh", help="Weigh a run."),
        CliCommandSpec(name="plugins weigh", app="acme_cli:weigh", help="Weigh a plugin."),
        CliCommandSpec(name="broken", app="no_such_module:app", help="Always breaks."),
    ]
"""
APP = """
import typer

app = typer.Typer()

@app.command()
def prepare(name: str, size: int = 3) -> None:
    "Prepare something."
    typer.echo(f"prepared {name} {size}")

def weigh(run_dir: str) -> None:
    "Weigh a run directory."
    typer.echo(f"weighed {run_dir}")
"""


def install(fake_environment) -> None:
    fake_environment.install("acme-tools", COMMANDS, modules={"acme_cli": APP})


def test_help_lists_commands_from_records_and_imports_none(fake_environment) -> None:
    fake_environment.install("acme-tools", COMMANDS, modules={"acme_cli": "raise AssertionError('imported')"})
    done = fake_environment.chatlearn("--help")
    assert done.returncode == 0, done.stderr
    for text in ("run", "plugins", "acme", "Work with Acme.", "broken", "Always breaks."):
        assert text in done.stdout


def test_a_group_with_one_command_stays_a_group(fake_environment) -> None:
    install(fake_environment)
    assert fake_environment.chatlearn("acme", "prepare", "gsm8k", "--size", "5").stdout == "prepared gsm8k 5\n"
    assert "Prepare something." in fake_environment.chatlearn("acme", "--help").stdout


def test_a_function_is_a_command(fake_environment) -> None:
    install(fake_environment)
    assert fake_environment.chatlearn("weigh", "runs/a").stdout == "weighed runs/a\n"
    assert "Weigh a run directory." in fake_environment.chatlearn("weigh", "--help").stdout


def test_a_command_that_cannot_be_imported_names_its_plugin(fake_environment) -> None:
    install(fake_environment)
    done = fake_environment.chatlearn("broken")
    assert done.returncode == 2
    assert "The command 'broken' (acme-tools 1.0) cannot be imported." in done.stderr
    assert "Traceback" not in done.stderr


def test_a_plugin_adds_a_command_to_the_group_plugins(fake_environment) -> None:
    install(fake_environment)
    listed = fake_environment.chatlearn("plugins", "--help").stdout
    assert all(text in listed for text in ("list", "matrix", "show", "Weigh a plugin."))
    assert fake_environment.chatlearn("plugins", "weigh", "runs/a").stdout == "weighed runs/a\n"
    assert "Weigh a plugin." not in fake_environment.chatlearn("--help").stdout
    done = fake_environment.chatlearn("plugins", "wiegh")
    assert done.stderr.startswith("error: No command named 'plugins wiegh' (command line).\n")
    assert done.stderr.endswith("  Did you mean 'plugins weigh'?\n")


@pytest.mark.parametrize("command", ["new", "check"])
def test_a_command_of_the_kit_says_how_to_install_it(fake_environment, command: str) -> None:
    hide = (
        "import importlib.metadata as metadata, sys\n"
        "found = metadata.distributions\n"
        "metadata.distributions = lambda **of: (d for d in found(**of) if d.name != 'chatlearn-testing')\n"
        "from chatlearn_cli.main import main\n"
        f"main(['plugins', {command!r}, 'acme-reward'])\n"
    )
    done = fake_environment.python("-c", hide)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: No command named 'plugins {command}' (command line).\n")
    assert done.stderr.endswith("  It comes with: pip install chatlearn-testing\n")


def test_an_unknown_command_names_the_nearest(fake_environment) -> None:
    install(fake_environment)
    done = fake_environment.chatlearn("wiegh")
    assert done.returncode == 2
    assert done.stderr.startswith("error: No command named 'wiegh' (command line).\n")
    assert done.stderr.endswith("  Did you mean 'weigh'?\n")


def test_an_unknown_command_is_explained_by_the_plugin_that_failed(fake_environment) -> None:
    fake_environment.install("acme-tools", "import no_such_module")
    done = fake_environment.chatlearn("acme")
    assert "failed to load: acme_tools (acme-tools 1.0): ModuleNotFoundError" in done.stderr


def test_no_plugin_can_take_away_the_commands_that_are_always_there(fake_environment) -> None:
    fake_environment.install("greedy", COMMANDS.replace('"acme", app', '"plugins", app'))
    done = fake_environment.chatlearn("plugins", "list", CHATLEARN_DISABLE_PLUGINS="chatlearn-cli")
    assert done.returncode == 0, done.stderr
    assert "greedy" in done.stdout
