from __future__ import annotations

import json

REWARD = """
from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import GeneratorSpec, RewardSpec

@hookimpl
def chatlearn_rewards():
    return [RewardSpec(name="fake", summary="A fake.", factory="fake_reward:Fake", options="fake_options:Options")]
"""
OPTIONS = """
from pydantic import BaseModel, Field

class Options(BaseModel):
    scale: float = Field(1.0, gt=0, description="What a right answer is worth.")
"""


def test_list_shows_all_and_a_broken_plugin_does_not_stop_it(fake_environment) -> None:
    fake_environment.install("good-dist", REWARD)
    fake_environment.install("bad-dist", "raise SystemExit(1)")
    done = fake_environment.chatlearn("plugins", "list")
    assert (done.returncode, done.stderr) == (0, "")
    rows = {line.split()[2]: line for line in done.stdout.splitlines()[1:]}
    assert rows["good-dist"].split() == ["reward", "fake", "good-dist", "1.0", "ok", "A", "fake."]
    assert "SystemExit(1): it tried to end the process" in rows["bad-dist"]


def test_list_under_strict_mode_fails_naming_the_broken(fake_environment) -> None:
    fake_environment.install("bad-dist", "raise SystemExit(1)")
    done = fake_environment.chatlearn("plugins", "list", "--strict-plugins")
    assert (done.returncode, done.stdout) == (2, "")
    assert "bad_dist (bad-dist 1.0): failed: SystemExit(1)" in done.stderr
    assert "Traceback" not in done.stderr


def test_show_fields_and_options(fake_environment) -> None:
    fake_environment.install("good-dist", REWARD, modules={"fake_options": OPTIONS})
    done = fake_environment.chatlearn("plugins", "show", "fake", "--kind", "reward")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert ["factory", "fake_reward:Fake"] in [line.split() for line in lines]
    assert lines[-1].split() == ["scale", "float", ">", "0", "1.0", "What", "a", "right", "answer", "is", "worth."]


def test_show_as_json_has_the_schema(fake_environment) -> None:
    fake_environment.install("good-dist", REWARD, modules={"fake_options": OPTIONS})
    (shown,) = json.loads(fake_environment.chatlearn("plugins", "show", "fake", "--json").stdout)["plugins"]
    assert (shown["distribution"], shown["record"]["unit"]) == ("good-dist", "sample")
    assert shown["options_schema"]["properties"]["scale"]["exclusiveMinimum"] == 0


def test_show_of_options_that_cannot_be_imported_names_the_plugin(fake_environment) -> None:
    fake_environment.install("good-dist", REWARD)
    done = fake_environment.chatlearn("plugins", "show", "fake")
    assert done.returncode == 2
    assert "The reward 'fake' (good-dist 1.0) cannot be imported." in done.stderr
    assert "options = 'fake_options:Options': ModuleNotFoundError" in done.stderr


def test_show_of_an_unknown_name(fake_environment) -> None:
    done = fake_environment.chatlearn("plugins", "show", "locale")
    assert done.returncode == 2
    assert done.stderr == (
        "error: No plugin named 'locale' is installed; `chatlearn plugins list` shows all. Did you mean 'local'?\n"
    )
