import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from chatlearn_cli.config import app

runner = CliRunner()

TRAINER_PLUGIN = """\
from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import AlgorithmSpec, TrainerSpec


@hookimpl
def chatlearn_trainers():
    return [TrainerSpec(name="acme", factory="acme_code:Trainer", options="acme_code:Options")]


@hookimpl
def chatlearn_algorithms():
    return [AlgorithmSpec(name="acme_sft", factory="acme_code:Sft", options="acme_code:Options")]
"""
OPTIONS = """\
from chatlearn_core.protocols import Algorithm, RoleUpdate
from pydantic import BaseModel


class Options(BaseModel, extra="forbid"):
    lr: float = 0.5

    @property
    def warnings(self):
        return [("lr", "nothing learns at this rate")] if self.lr == 0 else []


class Sft(Algorithm):
    input = "demonstrations"

    def __init__(self, options, context): ...

    def flow(self, examples, m):
        return examples

    def updates(self, step):
        from chatlearn_core.types import OutputRequest

        return [RoleUpdate("trainer", type("Loss", (), {"needs": OutputRequest(frozenset({"logprobs"}))}))]
"""
CONFIG = """\
model: {path: models/tiny}
data:
  train: [{path: a.jsonl}]
algorithm: {name: acme_sft}
roles:
  trainer: {kind: trainer, backend: acme}
train: {steps: 2, prompts_per_step: 4}
"""


@pytest.fixture
def config(fake_environment, tmp_path: Path) -> Path:
    fake_environment.install("acme-plugins", TRAINER_PLUGIN, modules={"acme_code": OPTIONS})
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


def test_show_prints_every_default_as_yaml(config: Path) -> None:
    result = runner.invoke(app, ["show", str(config), "name=first", "roles.trainer.options.lr=1e-3"])
    assert result.exit_code == 0, result.stderr
    shown = yaml.safe_load(result.stdout)
    assert shown["output_dir"] == "runs/first"
    assert shown["roles"]["trainer"]["options"] == {"lr": 0.001}
    assert shown["algorithm"]["options"] == {"lr": 0.5}
    assert shown["sampling"]["max_tokens"] == 512


def test_shown_configuration_loads_again(config: Path) -> None:
    first = runner.invoke(app, ["show", str(config)])
    config.write_text(first.stdout)
    assert runner.invoke(app, ["show", str(config)]).stdout == first.stdout


def test_show_json(config: Path) -> None:
    result = runner.invoke(app, ["show", str(config), "--json", "~roles.trainer.options", "seed=3"])
    assert result.exit_code == 2  # there is no such key to delete
    result = runner.invoke(app, ["show", str(config), "--json", "seed=3"])
    assert json.loads(result.stdout)["seed"] == 3


def test_validate(config: Path) -> None:
    result = runner.invoke(app, ["validate", str(config)])
    assert result.exit_code == 0, result.stderr
    assert result.stdout == (
        f"{config} is valid (algorithm: acme_sft, roles.trainer: acme, runtime: local)\n"
        "  sync: rollouts and updates take turns\n"
    )


@pytest.mark.parametrize("command", ["show", "validate"])
def test_problems_go_to_stderr_with_exit_code_2(command: str, config: Path) -> None:
    result = runner.invoke(app, [command, str(config), "train.stepz=1", "seed=-1"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"2 problems in {config}:\n")
    assert "override 'train.stepz=1': train.stepz: unknown key (got 1)\n    did you mean 'steps'?" in result.stderr
    assert "override 'seed=-1': seed: must be greater than or equal to 0 (got -1)" in result.stderr


def test_missing_file(tmp_path: Path) -> None:
    result = runner.invoke(app, ["validate", str(tmp_path / "none.yaml")])
    assert result.exit_code == 2
    assert "there is no such configuration file" in result.stderr


def test_schema(config: Path, tmp_path: Path) -> None:
    printed = runner.invoke(app, ["schema"])
    assert printed.exit_code == 0
    assert "trainer.acme" in json.loads(printed.stdout)["$defs"]
    output = tmp_path / "schema.json"
    assert runner.invoke(app, ["schema", "--output", str(output)]).exit_code == 0
    assert json.loads(output.read_text()) == json.loads(printed.stdout)
    refused = runner.invoke(app, ["schema", "--output", str(tmp_path / "no" / "schema.json")])
    assert refused.exit_code == 2
    assert "the schema cannot be written: No such file or directory" in refused.stderr


def test_importing_the_command_imports_no_engine_and_no_yaml_stack() -> None:
    code = (
        "import sys, chatlearn_cli.config; "
        "print(sorted({'torch', 'omegaconf', 'pydantic', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_loading_a_configuration_imports_no_torch() -> None:
    code = "import sys, chatlearn_core.config.load; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_validate_tells_warnings_and_still_succeeds(config: Path) -> None:
    result = runner.invoke(app, ["validate", str(config), "roles.trainer.options.lr=0"])
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count("warning: ") == 1
    assert "roles.trainer.options.lr: nothing learns at this rate (got 0.0)" in result.stderr
    assert "is valid" in result.stdout


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("roles.trainer.device=gpu:0", "trainer 'acme' does not run on gpu; it runs on: "),
        (
            "roles.critic={kind: trainer, backend: acme}",
            "roles.critic is defined, but the flow of algorithm 'acme_sft'",
        ),
        (
            "roles.trainer.trainable=false",
            "roles.trainer.trainable is false, but algorithm 'acme_sft' trains this role",
        ),
    ],
)
def test_validate_tells_what_a_run_would_find_in_the_flow(config: Path, override: str, problem: str) -> None:
    result = runner.invoke(app, ["validate", str(config), override])
    assert result.exit_code == 2
    assert problem in result.stderr
