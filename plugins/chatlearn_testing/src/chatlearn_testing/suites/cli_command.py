"""The contract of a command: it can be listed and explained without its engine, and refuses what it does not know."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from chatlearn_core.plugins.records import CliCommandSpec, Kind
from chatlearn_core.plugins.sources import COMMAND_LINE
from chatlearn_core.plugins.validation import command_name_problem
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.child_python import ENGINES, Finished, assert_imports_none_of, run_python
from chatlearn_testing.leftovers import Leftovers
from chatlearn_testing.suites.conformance_suite import ConformanceSuite, installed_plugins

UNKNOWN = "no-such-option"
UNKNOWN_COMMAND = "no-such-command"
USAGE_ERROR = 2
"""Exit code of a command line that cannot be understood."""
_RUN = """
import json, sys
from chatlearn_cli.lazy import load_command
from chatlearn_core.plugins.records import CliCommandSpec
record = CliCommandSpec(**json.loads(sys.argv[1]))
load_command(record, "conformance")(args=sys.argv[2:], prog_name="chatlearn " + record.name)
"""
_DESCRIBE = """
import json, sys
from chatlearn_cli.lazy import load_command
from chatlearn_core.plugins.records import CliCommandSpec
record = CliCommandSpec(**json.loads(sys.argv[1]))
found = []
def walk(command, path):
    options = [p for p in command.params if p.opts and p.opts[0].startswith("-") and not p.hidden]
    options = [p.opts[0] for p in options if not p.help]
    found.append([path, command.get_short_help_str(200), options])
    for name, below in getattr(command, "commands", {}).items():
        walk(below, [*path, name])
walk(load_command(record, "conformance"), [])
print(json.dumps(found))
"""


class CliCommandConformance(ConformanceSuite):
    """Contract tests that every command below ``chatlearn`` must pass.

    A subclass sets ``backend``, and ``limit_s`` if loading the command takes longer. Every command runs in a process of
    its own, in an empty folder and without input.
    """

    kind: ClassVar[Kind] = "cli_command"
    settable: ClassVar[frozenset[str]] = frozenset({"limit_s"})
    options_field: ClassVar[str | None] = None
    limit_s: ClassVar[float] = 60.0
    """Time for one command line, seconds."""

    def test_the_name_and_the_help_are_well_formed(self) -> None:
        """The name can follow ``chatlearn``; ``help``, or ``summary``, is one line that says what the command does:
        ``chatlearn --help`` shows it without importing the command.
        """
        record = self._command()
        problem = command_name_problem(record.name)
        assert problem is None, problem
        text = record.help or record.summary
        assert text.strip(), "the record has neither help nor summary"
        assert text == text.strip(), f"the help has blanks around it: {text!r}"
        assert "\n" not in text, f"the help has several lines: {text!r}"
        assert len(text) <= 120, f"the help has {len(text)} characters: {text!r}"
        assert text[0].isupper(), f"the help does not begin with a capital letter: {text!r}"
        assert text[-1] == ".", f"the help does not end with a full stop: {text!r}"

    def test_no_other_command_has_the_name(self) -> None:
        """No other installed distribution has a command of that name, and above all not the command line itself: its
        commands keep their names, and a plugin's command of such a name could never be called.
        """
        record = self._command()
        taken = {
            entry.distribution
            for entry in installed_plugins().entries
            if entry.kind == "cli_command" and entry.name == record.name and entry.record != record
        }
        assert COMMAND_LINE not in taken, (
            f"`chatlearn {record.name}` is a command of {COMMAND_LINE}; choose another name"
        )
        assert not taken, f"`chatlearn {record.name}` is a command of {', '.join(sorted(taken))}, too"

    def test_importing_it_imports_no_engine(self) -> None:
        """The module of ``app`` imports no engine and prints nothing: engines are imported where they are used, so that
        ``--help`` and shell completion answer at once.
        """
        module = self._command().app.partition(":")[0]
        required = {
            re.split(r"[^A-Za-z0-9_]", one)[0] for alternatives in self._command().requires for one in alternatives
        }
        assert_imports_none_of(ENGINES - required, [module], self.limit_s)

    def test_help_explains_the_command(self, tmp_path: Path) -> None:
        """``--help`` of the command, and of each command below it, ends with code 0, prints how to use it on standard
        output and nothing on standard error.
        """
        for path, _, _ in self._described():
            done = self._run(*path, "--help", cwd=tmp_path)
            shown = " ".join(["chatlearn", self._command().name, *path])
            assert done.code == 0, f"`{shown} --help` ends with {done.code}: {done.stderr[-500:]}"
            assert not done.stderr.strip(), f"`{shown} --help` prints to standard error: {done.stderr[:300]!r}"
            assert "Usage" in done.stdout, f"`{shown} --help` does not say how it is used: {done.stdout[:300]!r}"
            assert len(done.stdout.split()) > 8, f"`{shown} --help` explains nothing: {done.stdout[:300]!r}"

    def test_options_are_explained(self) -> None:
        """Every command has a text, and every option a help."""
        for path, text, silent in self._described():
            shown = " ".join(["chatlearn", self._command().name, *path])
            assert text.strip(), f"`{shown}` has no text: give its function a docstring"
            assert not silent, f"`{shown}`: {', '.join(silent)} has no help"

    def test_unknown_options_are_refused(self, tmp_path: Path) -> None:
        """An unknown option ends with code 2 and a message that names it, without a traceback and before anything is
        done; in a group, so does an unknown command.
        """
        described = self._described()
        lines = [[*path, f"--{UNKNOWN}"] for path, _, _ in described]
        lines += [[UNKNOWN_COMMAND]] if len(described) > 1 else []
        for line in lines:
            done = self._run(*line, cwd=tmp_path)
            shown = " ".join(["chatlearn", self._command().name, *line])
            assert done.code == USAGE_ERROR, f"`{shown}` ends with {done.code}, not {USAGE_ERROR}: {done.stderr[-300:]}"
            assert "Traceback" not in done.stderr, f"`{shown}` ends with a traceback: {done.stderr[-500:]}"
            plain = re.sub(r"\x1b\[[0-9;]*m|[│\s]", "", done.stderr)
            assert line[-1] in plain, f"`{shown}` does not say what is wrong: {done.stderr[-300:]}"

    def test_nothing_is_left_behind(self, tmp_path: Path) -> None:
        """Neither ``--help`` nor a refused command line leaves a file, a process, a port or shared memory behind."""
        folder, home = tmp_path / "here", tmp_path / "home"
        folder.mkdir()
        home.mkdir()
        with Leftovers(wait_s=10.0):
            self._run("--help", cwd=folder, environment={"HOME": str(home), "XDG_CACHE_HOME": str(tmp_path / "cache")})
            self._run(
                f"--{UNKNOWN}", cwd=folder, environment={"HOME": str(home), "XDG_CACHE_HOME": str(tmp_path / "cache")}
            )
        left = sorted(path.name for place in (folder, home) for path in place.iterdir())
        assert not left, f"left in the working directory or the home directory: {', '.join(left)}"

    def test_narrow_terminals_and_plain_ones_are_served(self, tmp_path: Path) -> None:
        """``--help`` works on a terminal of 40 columns, without colours and with ASCII alone."""
        plain = {"COLUMNS": "40", "TERM": "dumb", "NO_COLOR": "1", "LC_ALL": "C", "PYTHONIOENCODING": "ascii:replace"}
        done = self._run("--help", cwd=tmp_path, environment=plain)
        assert done.code == 0, f"--help ends with {done.code} on a plain terminal: {done.stderr[-500:]}"

    def test_it_is_listed(self, tmp_path: Path) -> None:
        """``chatlearn --help`` lists the installed command with the text of its record."""
        record = self._command()
        if record not in installed_plugins().records("cli_command"):
            not_applicable("the command is not installed")
        group, _, word = record.name.rpartition(" ")
        done = run_python(["-m", "chatlearn_cli.main", *group.split(), "--help"], self.limit_s, cwd=tmp_path)
        assert done.code == 0, done.stderr[-300:]
        assert re.search(rf"\b{re.escape(word)}\b", done.stdout), f"`chatlearn {group} --help` does not list {word!r}"

    # Internal methods

    def _command(self) -> CliCommandSpec:
        record: CliCommandSpec = self.record()
        return record

    def _fields(self) -> str:
        record = self._command()
        return json.dumps({"name": record.name, "app": record.app, "help": record.help, "summary": record.summary})

    def _run(self, *words: str, cwd: Path, environment: Mapping[str, str] | None = None) -> Finished:
        return run_python(["-c", _RUN, self._fields(), *words], self.limit_s, cwd=cwd, environment=environment)

    def _described(self) -> list[tuple[list[str], str, list[str]]]:
        """(words below the command, text, options without help) of the command and of each below it."""
        done = run_python(["-c", _DESCRIBE, self._fields()], self.limit_s)
        assert done.code == 0, f"the command cannot be loaded: {done.stderr[-500:]}"
        found: list[Any] = json.loads(done.stdout.splitlines()[-1])
        return [(path, text, silent) for path, text, silent in found]
