from __future__ import annotations

import json
import logging
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from chatlearn_core.exceptions import PluginError
from chatlearn_core.plugins.entry import PluginEntry
from chatlearn_core.plugins.loader import discover_plugins, load_plugins
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.plugins.sources import DisabledDistributions, PluginSource

IMPORTS = """
from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import *
"""
REWARD = (
    IMPORTS
    + """
@hookimpl
def chatlearn_rewards():
    return [RewardSpec(name="fake", summary="A fake.", factory="fake_reward:Fake", options="fake_reward:Options")]
"""
)


def reward_plugin(arguments: str) -> str:
    """A plugin whose one reward has these arguments besides the required ones."""
    return IMPORTS + (
        "@hookimpl\ndef chatlearn_rewards():\n"
        f"    return [RewardSpec(**{{**dict(name='fake', factory='m:F', options='m:O'), **dict({arguments})}})]\n"
    )


def entries_of(registry: PluginRegistry, distribution: str) -> list[PluginEntry]:
    return [entry for entry in registry.entries if entry.distribution == distribution]


def only_entry(distribution: str) -> PluginEntry:
    (entry,) = entries_of(discover_plugins(), distribution)
    return entry


def test_a_plugin_that_works(fake_environment) -> None:
    fake_environment.install("acme-rewards", REWARD, version="0.3.0")
    entry = only_entry("acme-rewards")
    assert (entry.name, entry.kind, entry.status, entry.version) == ("fake", "reward", "ok", "0.3.0")
    assert entry.record is not None
    assert entry.record.summary == "A fake."
    assert "fake_reward" not in sys.modules


@pytest.mark.parametrize(
    ("plugin", "status", "reason"),
    [
        pytest.param("import acme_engine", "failed", "ModuleNotFoundError: No module named 'acme_engine'", id="import"),
        pytest.param("raise SystemExit(3)", "failed", "SystemExit(3): it tried to end the process", id="exit"),
        pytest.param(
            "def rewards():\n    return []", "failed", "implements no hook: none of its functions", id="no-hook"
        ),
        pytest.param("1/0", "failed", "ZeroDivisionError: division by zero", id="raises"),
        pytest.param("def f(:", "failed", "SyntaxError: ", id="syntax"),
        pytest.param("def f():\n  pass\n  def", "failed", "bad_dist_plugin.py, line 3)", id="syntax-line"),
        pytest.param(
            IMPORTS + "@hookimpl\ndef chatlearn_rewards():\n    raise RuntimeError('no licence')",
            "failed",
            "chatlearn_rewards raised RuntimeError: no licence",
            id="hook-raises",
        ),
        pytest.param(
            IMPORTS + "@hookimpl\ndef chatlearn_rewards():\n    yield 3\n    raise SystemExit",
            "failed",
            "chatlearn_rewards raised SystemExit(None)",
            id="hook-exits-midway",
        ),
        pytest.param(
            IMPORTS + "@hookimpl\ndef chatlearn_rewards():\n    return RewardSpec(name='x', factory='m:F')",
            "failed",
            "missing 1 required keyword-only argument: 'options'",
            id="missing-attribute",
        ),
        pytest.param(
            IMPORTS
            + "@hookimpl\ndef chatlearn_rewards():\n    return RewardSpec(name='x', factory='m:F', options='m:O')",
            "failed",
            "it must return a list of records",
            id="one-record",
        ),
        pytest.param(
            IMPORTS + "@hookimpl\ndef chatlearn_rewards():\n    return None",
            "failed",
            "chatlearn_rewards returned a NoneType: None; it must return a list of records",
            id="none",
        ),
        pytest.param(
            IMPORTS + "@hookimpl\ndef chatlearn_rewards():\n    return 'fake'",
            "failed",
            "returned a str: 'fake'; it must return a list of records",
            id="string",
        ),
        pytest.param(
            IMPORTS + "@hookimpl\nasync def chatlearn_rewards():\n    return []",
            "failed",
            "chatlearn_rewards is an async function; hooks are called and not awaited",
            id="async",
        ),
        pytest.param(
            IMPORTS + "@hookimpl\ndef chatlearn_step_end(step):\n    yield step",
            "failed",
            "chatlearn_step_end is a generator function; its body would never run",
            id="generator-observer",
        ),
        pytest.param(
            IMPORTS + "@hookimpl\ndef chatlearn_rewards():\n    return [{'name': 'fake'}]",
            "failed",
            "chatlearn_rewards returned a dict: {'name': 'fake'}; it must return RewardSpec records",
            id="garbage",
        ),
        pytest.param(
            IMPORTS
            + "@hookimpl\ndef chatlearn_trainers():\n    return [RewardSpec(name='x', factory='m:F', options='m:O')]",
            "failed",
            "it must return TrainerSpec records (RewardSpec belongs in chatlearn_rewards)",
            id="wrong-type",
        ),
        pytest.param(
            reward_plugin("api_version=99"),
            "incompatible",
            "written for plugin API 99, this ChatLearn has plugin API 2; update ChatLearn",
            id="newer-api",
        ),
        pytest.param(
            reward_plugin("api_version=0"),
            "incompatible",
            "written for plugin API 0, this ChatLearn has plugin API 2; update the plugin",
            id="older-api",
        ),
        pytest.param(
            reward_plugin("factory='m.F'"),
            "failed",
            "factory: 'm.F' is not an import string; an import string is 'package.module:Attribute'",
            id="import-string",
        ),
        pytest.param(
            reward_plugin("name='Fake Reward'"), "failed", "name 'Fake Reward': a name is lower-case", id="name"
        ),
        pytest.param(
            reward_plugin("requires=(('no-such-engine>=2', 'no-such-engine-cpu'),)"),
            "missing-engine",
            "needs no-such-engine>=2 or no-such-engine-cpu; installed: none",
            id="engine-missing",
        ),
        pytest.param(
            IMPORTS + "@hookimpl\ndef chatlearn_reward():\n    return []",
            "failed",
            "implements chatlearn_reward, which is not a hook. Did you mean 'chatlearn_rewards'?",
            id="misspelled",
        ),
        pytest.param(
            IMPORTS + "def chatlearn_rewards():\n    return []",
            "failed",
            "chatlearn_rewards is never called: it is not marked with @hookimpl",
            id="unmarked",
        ),
        pytest.param(
            IMPORTS + "def chatlearn_step_ends(step):\n    pass",
            "failed",
            "chatlearn_step_ends is not a hook, and names with chatlearn_ are for hooks."
            " Did you mean 'chatlearn_step_end'?",
            id="unmarked-misspelled",
        ),
        pytest.param(
            IMPORTS + "@hookimpl\ndef chatlearn_step_end(step, metric):\n    pass",
            "failed",
            "Argument(s) {'metric'} are declared in the hookimpl but can not be found in the hookspec",
            id="argument",
        ),
        pytest.param(
            IMPORTS + "@hookimpl(wrapper=True)\ndef chatlearn_rewards():\n    return (yield)",
            "failed",
            "chatlearn_rewards is a hook wrapper; hooks of ChatLearn cannot be wrapped",
            id="wrapper",
        ),
    ],
)
def test_a_plugin_that_fails_is_reported_and_harms_nobody(fake_environment, plugin, status, reason) -> None:
    fake_environment.install("bad-dist", plugin)
    fake_environment.install("good-dist", REWARD.replace('"fake"', '"good"'))
    entry = only_entry("bad-dist")
    assert (entry.status, only_entry("good-dist").status) == (status, "ok")
    assert reason in entry.reason


def test_an_interrupt_while_loading_is_not_a_plugin_failure(fake_environment) -> None:
    fake_environment.install("slow-dist", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        discover_plugins()


def test_an_optional_hook_may_be_unknown(fake_environment) -> None:
    """pluggy's own way to implement a hook that only a later version of the host has."""
    fake_environment.install("modern", REWARD + "\n@hookimpl(optionalhook=True)\ndef chatlearn_telepathy(): ...\n")
    assert only_entry("modern").status == "ok"


def test_a_misspelled_hook_leaves_the_others_of_its_plugin_working(fake_environment) -> None:
    fake_environment.install("half", REWARD + "\n@hookimpl\ndef chatlearn_trainer():\n    return []\n")
    assert sorted(entry.status for entry in entries_of(discover_plugins(), "half")) == ["failed", "ok"]


def test_a_bad_record_leaves_the_others_of_its_hook_working(fake_environment) -> None:
    fake_environment.install(
        "half",
        IMPORTS + "@hookimpl\ndef chatlearn_rewards():\n"
        "    return [3, RewardSpec(name='good', factory='m:F', options='m:O')]\n",
    )
    assert sorted(entry.status for entry in entries_of(discover_plugins(), "half")) == ["failed", "ok"]


def test_two_distributions_with_one_name_are_both_in_conflict(fake_environment) -> None:
    fake_environment.install("first-dist", REWARD, version="1.2")
    fake_environment.install("second-dist", REWARD, version="3.4")
    entries = [entry for entry in discover_plugins().entries if entry.name == "fake"]
    assert [entry.status for entry in entries] == ["conflict", "conflict"]
    for entry in entries:
        assert entry.reason.startswith("registered by first-dist 1.2, second-dist 3.4; ")


def test_one_name_of_two_kinds_is_no_conflict(fake_environment) -> None:
    logger = REWARD.replace("chatlearn_rewards", "chatlearn_loggers").replace("RewardSpec(", "LoggerSpec(")
    fake_environment.install("first-dist", REWARD)
    fake_environment.install("second-dist", logger)
    assert [entry.status for entry in discover_plugins().entries if entry.name == "fake"] == ["ok", "ok"]


@pytest.mark.parametrize("name", ["plugins", "plugins list"])
def test_a_plugin_cannot_take_a_command_of_the_command_line(fake_environment, name: str) -> None:
    command = f'@hookimpl\ndef chatlearn_cli_commands():\n    return [CliCommandSpec(name={name!r}, app="m:f")]\n'
    fake_environment.install("greedy", IMPORTS + command)
    entries = [entry for entry in discover_plugins().entries if (entry.kind, entry.name) == ("cli_command", name)]
    assert {entry.distribution: entry.status for entry in entries} == {"chatlearn-cli": "ok", "greedy": "conflict"}


def test_an_engine_that_is_too_old(fake_environment) -> None:
    fake_environment.install("acme-engine", version="0.9.1")
    fake_environment.install("too-new", reward_plugin("requires=(('acme-engine>=1', 'acme-engine-cpu>=1'),)"))
    entry = only_entry("too-new")
    assert entry.status == "missing-engine"
    assert entry.reason == "needs acme-engine>=1 or acme-engine-cpu>=1; installed: acme-engine 0.9.1"


def test_an_engine_that_is_there(fake_environment) -> None:
    fake_environment.install("acme-engine-cpu", version="1.0+local")
    fake_environment.install("fits", reward_plugin("requires=(('acme-engine>=1', 'ACME_engine.cpu>=1'),)"))
    assert only_entry("fits").status == "ok"


def test_a_distribution_for_another_core_is_not_imported(fake_environment) -> None:
    fake_environment.install("from-the-future", "raise AssertionError('imported')", requires=["chatlearn-core>=99"])
    entry = only_entry("from-the-future")
    assert entry.status == "incompatible"
    assert entry.reason.startswith("requires chatlearn-core>=99; installed: chatlearn-core ")


def test_a_disabled_distribution_is_not_imported(fake_environment, monkeypatch) -> None:
    fake_environment.install("Broken-Dist", "raise AssertionError('imported')")
    monkeypatch.setenv("CHATLEARN_DISABLE_PLUGINS", "broken_dist, ,")
    entry = only_entry("Broken-Dist")
    assert (entry.status, entry.reason) == ("disabled", "by CHATLEARN_DISABLE_PLUGINS")


def test_disabling_what_is_not_installed_is_said(fake_environment, monkeypatch) -> None:
    fake_environment.install("acme-rewards", REWARD)
    monkeypatch.setenv("CHATLEARN_DISABLE_PLUGINS", "acme-reward")
    (warning,) = discover_plugins().warnings
    assert "'acme-reward'" in warning
    assert "Did you mean 'acme-rewards'?" in warning


def test_strict_mode_names_every_plugin_that_is_not_ok() -> None:
    sources = [
        PluginSource("gone", "gone-dist", "1.0", load=lambda: __import__("no_such_module")),
        PluginSource("old", "old-dist", "2.0", load=lambda: None, incompatible="requires chatlearn-core<0.1"),
    ]
    with pytest.raises(PluginError) as caught:
        load_plugins(sources, disabled=DisabledDistributions(), strict=True)
    message = str(caught.value)
    assert message.startswith("Strict mode: every installed plugin must be usable.\n")
    assert "gone (gone-dist 1.0): failed: ModuleNotFoundError" in message
    assert "old (old-dist 2.0): incompatible: requires chatlearn-core<0.1" in message
    load_plugins(sources, disabled=DisabledDistributions(("gone_dist", "old.dist")), strict=True)
    with pytest.raises(PluginError, match="which no installed plugin distribution is called"):
        load_plugins([], disabled=DisabledDistributions(("gone-dist",)), strict=True)


def test_strict_mode_lets_an_engine_live_in_another_interpreter(fake_environment) -> None:
    generator = reward_plugin("requires=(('no-such-engine',),), own_interpreter=True")
    generator = generator.replace("chatlearn_rewards", "chatlearn_generators").replace("RewardSpec(", "GeneratorSpec(")
    fake_environment.install("far-engine", generator)
    entry = only_entry("far-engine")
    assert entry.status == "missing-engine"
    assert entry.reason.endswith("or set options.python to an interpreter that has it")
    source = PluginSource("far", "far-engine", "1.0", load=lambda: __import__("far_engine_plugin"))
    load_plugins([source], disabled=DisabledDistributions(), strict=True)


def test_observers_are_collected_with_their_origin(fake_environment, caplog) -> None:
    fake_environment.install(
        "watcher", IMPORTS + "@hookimpl\ndef chatlearn_step_end(metrics):\n    raise ValueError(metrics['loss'])\n"
    )
    registry = discover_plugins()
    with caplog.at_level(logging.WARNING):
        registry.observers.step_end(3, {"loss": 0.5})
    assert registry.observers.failures == {("watcher 1.0", "chatlearn_step_end"): 1}
    assert "chatlearn_step_end of watcher 1.0 raised ValueError: 0.5" in caplog.text


def test_what_a_plugin_prints_while_loading_does_not_mix_with_output(fake_environment) -> None:
    """It is dropped in the child; of a plugin that is imported here, too, because it failed, it goes to stderr."""
    fake_environment.install("chatty", "print('banner')" + REWARD)
    fake_environment.install("loud", "print('last words')\nraise ValueError('no luck')")
    done = fake_environment.chatlearn("plugins", "list", "--json")
    assert {"chatty", "loud"} <= {plugin["distribution"] for plugin in json.loads(done.stdout)["plugins"]}
    assert "last words" in done.stderr
    assert "banner" not in done.stderr


def test_metadata_that_cannot_be_parsed_fail_alone(fake_environment) -> None:
    fake_environment.install("torn", entry_points="[chatlearn]\ntorn\n")
    fake_environment.install("good-dist", REWARD)
    assert (only_entry("torn").status, only_entry("good-dist").status) == ("failed", "ok")


def test_entry_points_that_are_not_text_fail_alone(fake_environment) -> None:
    fake_environment.install("torn", entry_points="")
    (fake_environment.site / "torn-1.0.dist-info" / "entry_points.txt").write_bytes(b"[chatlearn]\n\xff = x\n")
    fake_environment.install("good-dist", REWARD)
    assert "UnicodeDecodeError" in only_entry("torn").reason
    assert only_entry("good-dist").status == "ok"


def test_what_is_left_of_a_removed_distribution_is_reported(fake_environment) -> None:
    fake_environment.install("half-gone", "raise AssertionError")
    (fake_environment.site / "half_gone-1.0.dist-info" / "METADATA").unlink()
    assert only_entry("(unnamed distribution)").version == "(unknown version)"


def test_a_wheel_installed_by_pip_is_found(fake_environment, tmp_path: Path) -> None:
    wheel = tmp_path / "acme_rewards-0.3.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        info = "acme_rewards-0.3.0.dist-info"
        archive.writestr("acme_plugin.py", REWARD)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: acme-rewards\nVersion: 0.3.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/entry_points.txt", "[chatlearn]\nacme = acme_plugin\n")
        archive.writestr(f"{info}/RECORD", "")
    command = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(fake_environment.site)]
    subprocess.run([sys.executable, *command, str(wheel)], check=True, capture_output=True, text=True)
    done = fake_environment.chatlearn("plugins", "list", "--json")
    found = [plugin for plugin in json.loads(done.stdout)["plugins"] if plugin["distribution"] == "acme-rewards"]
    assert found == [
        {
            "name": "fake",
            "kind": "reward",
            "distribution": "acme-rewards",
            "version": "0.3.0",
            "status": "ok",
            "reason": "",
            "summary": "A fake.",
        }
    ]


def test_discovery_imports_no_engine(fake_environment) -> None:
    """The whole listing, first-party plugins included, without torch or pydantic."""
    done = fake_environment.python(
        "-c",
        "import sys; from chatlearn_core.plugins.loader import discover_plugins; discover_plugins();"
        "print([name for name in ('torch', 'numpy', 'transformers', 'pydantic', 'typer') if name in sys.modules])",
    )
    assert done.stdout.strip() == "[]", done.stderr
