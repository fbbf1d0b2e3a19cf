from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from chatlearn_cli.plugins import app
from chatlearn_core.exceptions import ChatLearnError, ConfigError, PluginNotFoundError
from chatlearn_testing.scaffold import write_plugin

pytestmark = pytest.mark.slow  # every suite runs in a process that imports torch
REWARD = """
from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import RewardSpec

@hookimpl
def chatlearn_rewards():
    return [RewardSpec(name="lax", factory="no_such_module:Fake", options="lax_options:Options")]
"""
LAX_OPTIONS = """
from pydantic import BaseModel

class Options(BaseModel):
    scale: float = 1.0
"""


def check(*arguments: str) -> tuple[int, str]:
    """Exit code and output; errors of ChatLearn are raised, as the command line prints them."""
    done = CliRunner().invoke(app, ["check", *arguments])
    if isinstance(done.exception, ChatLearnError):
        raise done.exception
    return done.exit_code, done.output


UNTESTED = """
from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import DatasetSpec

CODE = {"factory": "untested_code:make", "options": "untested_code:Options"}

@hookimpl
def chatlearn_datasets():
    return [DatasetSpec(name="rows", **CODE), DatasetSpec(name="lines", reads=frozenset({".zed"}), **CODE)]
"""
UNTESTED_CODE = """
from pydantic import BaseModel, ConfigDict

class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")

def make(options):
    raise AssertionError("no suite calls this")
"""


@pytest.fixture
def written(fake_environment, tmp_path: Path) -> Any:
    """Writes a plugin from the template and installs it; ``change`` is applied to its module."""

    def write(name: str, kind: str, change: tuple[str, str] = ("", "")) -> None:
        names, _ = write_plugin(name, kind, tmp_path / "out")
        package = fake_environment.site / names.package
        shutil.copytree(tmp_path / "out" / names.distribution / "src" / names.package, package)
        module = package / f"{kind}.py"
        if change != ("", ""):
            assert change[0] in module.read_text()
            module.write_text(module.read_text().replace(*change))
        entry_points = f"[chatlearn]\n{names.plugin} = {names.package}.plugin\n"
        fake_environment.install(names.distribution, entry_points=entry_points)

    return write


@pytest.mark.parametrize("kind", ["reward", "generator"])
def test_what_conforms_passes(written, kind: str) -> None:
    written(f"zed-{kind}", kind)
    code, output = check(f"Zed_{kind}")
    assert code == 0, output
    header, record, suite, *_ = output.splitlines()
    assert header.split() == ["KIND", "NAME", "SUITE", "PASSED", "FAILED", "NOT", "APPLICABLE"]
    assert record.split() == [kind, "zed", "record", "2", "0", "0", "passed"]
    assert suite.split()[:3] == [kind, "zed", f"{kind.capitalize()}Conformance"]
    assert suite.split()[-1] == "passed"


def test_results_are_written_for_machines_and_readers(written, tmp_path: Path) -> None:
    written("zed-reward", "reward", ("coverage - penalty,", "coverage + penalty,"))
    files = [tmp_path / "result.json", tmp_path / "result.xml"]
    code, output = check("zed-reward", "--stress", "2", "--output", str(files[0]), "--output", str(files[1]))
    assert code == 1
    assert "img.shields.io" not in output
    result = json.loads(files[0].read_text())
    assert (result["distribution"], result["verdict"], result["runs"], result["badge"]) == (
        "zed-reward", "failed", 2, None
    )  # fmt: skip
    assert {"python", "zed-reward", "chatlearn-core", "chatlearn-testing", "torch"} <= result["versions"].keys()
    [_, suite] = result["checks"]
    failed = {test["name"] for test in suite["tests"] if test["verdict"] == "failed"}
    by_run = [{name.removesuffix(f" (run {n})") for name in failed if name.endswith(f"(run {n})")} for n in (1, 2)]
    assert by_run[0] == by_run[1] != set()
    assert len(suite["tests"]) == suite["passed"] + len(suite["failures"]) + sum(
        test["verdict"] == "skipped" for test in suite["tests"]
    )
    assert any(test["seconds"] > 0.0 for test in suite["tests"])
    root = ElementTree.parse(files[1]).getroot()
    cases = [case for case in root.iter("testcase") if case.get("classname") == "reward.zed"]
    assert {case.get("name") for case in cases if case.find("failure") is not None} == failed
    assert sum(int(one.get("failures", "")) for one in root) == len(failed)


def test_a_pass_gives_a_line_for_the_readme(written, tmp_path: Path) -> None:
    written("zed-algorithm", "algorithm")
    file = tmp_path / "result.json"
    code, output = check("zed-algorithm", "--output", str(file))
    assert code == 0, output
    badge = json.loads(file.read_text())["badge"]
    assert badge in output
    assert re.fullmatch(
        r"!\[zed-algorithm \S+, chatlearn-testing \S+: \d+ contract tests passed\]\(https://\S+\)", badge
    )


def test_a_result_file_of_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"result\.txt: the name must end in \.json, or in \.xml"):
        check("chatlearn-data", "--output", str(tmp_path / "result.txt"))


def test_what_does_not_apply_is_shown_with_the_reason(written) -> None:
    written("zed-generator", "generator")
    _, output = check("zed-generator")
    assert "generator zed: test_given_tokens_are_scored[1.0]: the record does not declare 'scores'" in output


def test_a_broken_plugin_fails_and_the_contract_is_named(written) -> None:
    written("broken-reward", "reward", ("coverage - penalty,", "coverage + penalty,"))
    code, output = check("broken-reward", "--json")
    assert code == 1
    [record, suite] = json.loads(output)["checks"]
    assert (record["verdict"], suite["verdict"]) == ("passed", "failed")
    assert any("test_one_result_a_sample_in_order" in line and "1.25" in line for line in suite["failures"])


def test_code_that_cannot_be_imported_and_lax_options_fail(fake_environment) -> None:
    fake_environment.install("lax-dist", REWARD, modules={"lax_options": LAX_OPTIONS})
    code, output = check("lax-dist")
    assert code == 1
    assert "No module named 'no_such_module'" in output
    assert 'set model_config = ConfigDict(extra="forbid")' in output


def test_a_plugin_that_does_not_load_fails(fake_environment) -> None:
    fake_environment.install("bad-dist", "raise RuntimeError('no luck')")
    code, output = check("bad-dist")
    assert code == 1
    assert "status: failed: RuntimeError: no luck" in output


def test_a_suite_that_lacks_something_is_not_run_and_says_what_to_give(written, fake_environment) -> None:
    written("zed-reward", "reward")
    fake_environment.site.joinpath("zed_reward/conformance.py").unlink()
    code, output = check("zed-reward")
    assert code == 3
    assert "so this is no pass (exit code 3)" in output
    assert "give 'cases' in zed_reward.conformance:SETTINGS['reward/zed']" in output


def test_settings_that_cannot_be_imported_fail(written, fake_environment) -> None:
    written("zed-reward", "reward")
    fake_environment.site.joinpath("zed_reward/conformance.py").write_text("SETTING = {}")
    code, output = check("zed-reward")
    assert code == 1
    assert "zed_reward.conformance: AttributeError" in output


def test_a_test_that_ends_the_process_or_hangs_fails_and_the_rest_goes_on(written, tmp_path: Path) -> None:
    """The first scoring ends the process, the second one never returns, all others do what they should."""
    (tmp_path / "count").mkdir()
    trap = f"""
        import os, time
        from pathlib import Path
        count = Path({str(tmp_path / "count")!r})
        number = len(list(count.iterdir()))
        (count / str(number)).mkdir()  # a file would count as left behind
        if number == 0:
            os._exit(3)
        if number == 1:
            time.sleep(1e6)
"""
    package, line = "broken-reward", "        text = sample"
    written(package, "reward", (line, trap.lstrip("\n") + line))
    code, output = check(package, "--json", "--test-timeout", "15")
    assert code == 1
    [record, suite] = json.loads(output)["checks"]
    assert record["verdict"] == "passed"
    first, second = suite["failures"]
    assert "ended the process (exit code 3)" in first
    assert "did not end within 15 s (--test-timeout); it hangs in" in second
    assert "reward.py" in second
    assert suite["passed"] > 5


def test_a_suite_that_cannot_begin_is_told(written, fake_environment) -> None:
    written("zed-reward", "reward")
    fake_environment.site.joinpath("zed_reward/conformance.py").write_text("import os\nos._exit(7)\n")
    code, output = check("zed-reward")
    assert code == 1
    assert "the suite could not be run: ended the process (exit code 7)" in output


def test_the_limit_of_everything_is_told(written, fake_environment, monkeypatch: pytest.MonkeyPatch) -> None:
    written("zed-reward", "reward")
    fake_environment.site.joinpath("zed_reward/conformance.py").write_text("import time\ntime.sleep(1e6)\n")
    code, output = check("zed-reward", "--timeout", "5")
    assert code == 1
    assert "the limit of 5 s for everything (--timeout) was over before all tests were run" in output


def test_records_without_cases_are_checked_and_are_no_pass(fake_environment) -> None:
    fake_environment.install("untested-dist", UNTESTED, modules={"untested_code": UNTESTED_CODE})
    code, output = check("untested-dist")
    assert code == 3, output
    assert any(line.split() == ["dataset", "rows", "record", "2", "0", "0", "passed"] for line in output.splitlines())
    assert "no files with known rows: give 'cases' in untested_code.conformance:SETTINGS['dataset/lines']" in output
    assert "no rows with known examples: give 'cases' in untested_code.conformance:SETTINGS['dataset/rows']" in output


@pytest.mark.parametrize(
    ("name", "message"),
    [("chatlearn-cor", r"Did you mean 'chatlearn-core'\?"), ("numpy", "is installed and registers nothing")],
)
def test_an_unknown_distribution_is_an_error(name: str, message: str) -> None:
    with pytest.raises(PluginNotFoundError, match=message):
        check(name)
