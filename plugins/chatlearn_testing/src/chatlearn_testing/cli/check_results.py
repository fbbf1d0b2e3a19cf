"""What ``chatlearn plugins check`` found, as a file and as a line for a README."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote
from xml.etree import ElementTree

from chatlearn_core.exceptions import ConfigError
from chatlearn_testing.cli.check_entries import Check

LIBRARIES = ("chatlearn-core", "chatlearn-testing", "torch", "transformers", "vllm", "sglang", "ray")
"""Distributions whose versions a result names, where they are installed."""
NO_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot hold, such as colours of a terminal."""


@dataclass(slots=True, frozen=True)
class CheckResult:
    """The checks of one distribution."""

    distribution: str
    checks: Sequence[Check]
    runs: int
    """How often each suite was run."""

    @property
    def verdict(self) -> Literal["passed", "failed", "not run"]:
        """Failed if anything failed; passed if something passed and every suite was run."""
        verdicts = {check.verdict for check in self.checks}
        if "failed" in verdicts:
            return "failed"
        return "passed" if verdicts == {"passed"} else "not run"

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the distribution, Python and the libraries that are installed."""
        found = {"python": platform.python_version()}
        for name in (self.distribution, *LIBRARIES):
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return found

    def as_json(self) -> dict[str, Any]:
        """Everything, in the form of the JSON file."""
        return {
            "distribution": self.distribution,
            "verdict": self.verdict,
            "versions": self.versions,
            "platform": platform.platform(),
            "runs": self.runs,
            "badge": self.badge() if self.verdict == "passed" else None,
            "checks": [{**asdict(check), "verdict": check.verdict} for check in self.checks],
        }

    def badge(self) -> str:
        """A Markdown image for the distribution's README, which names versions and the number of tests passed."""
        versions = self.versions
        passed = sum(check.passed for check in self.checks)
        kit = versions.get("chatlearn-testing", "?")
        label = f"{self.distribution} {versions.get(self.distribution, '?')}, chatlearn-testing {kit}"
        text = "-".join(
            quote(part.replace("-", "--").replace("_", "__"), safe="")
            for part in (label, f"{passed} contract tests passed", "brightgreen")
        )
        return f"![{label}: {passed} contract tests passed](https://img.shields.io/badge/{text})"

    def write(self, file: Path) -> None:
        """Write a result file: JUnit's XML if its name ends in ``.xml``, JSON if it ends in ``.json``.

        Raises:
            ConfigError: it has another ending, or cannot be written.
        """
        check_result_file(file)
        text = junit(self) if file.suffix == ".xml" else json.dumps(self.as_json(), indent=2) + "\n"
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--output {file}: the result cannot be written there: {error}") from error


def check_result_file(file: Path) -> None:
    """Refuse a name from which the format does not follow.

    Raises:
        ConfigError: names the endings.
    """
    if file.suffix not in (".json", ".xml"):
        raise ConfigError(f"--output {file}: the name must end in .json, or in .xml for JUnit's format")


def junit(result: CheckResult) -> str:
    """The result in JUnit's XML: a suite for each check, a case for each test."""
    root = ElementTree.Element("testsuites", name=f"chatlearn plugins check {result.distribution}")
    for check in result.checks:
        failures = check.failures if not check.tests else [t.reason for t in check.tests if t.verdict == "failed"]
        suite = ElementTree.SubElement(
            root, "testsuite", name=f"{check.kind}/{check.name} {check.suite}", failures=str(len(failures)), errors="0"
        )
        properties = ElementTree.SubElement(suite, "properties")
        for name, version in result.versions.items():
            ElementTree.SubElement(properties, "property", name=name, value=version)
        where = f"{check.kind}.{check.name}"
        count, skipped = 0, 0
        for test in check.tests:
            case = _case(suite, where, test.name, test.seconds)
            if test.verdict != "passed":
                kind = "failure" if test.verdict == "failed" else "skipped"
                ElementTree.SubElement(case, kind, message=_plain(test.reason))
            count, skipped = count + 1, skipped + (test.verdict == "skipped")
        listed = {f"{test.name}: {test.reason}" for test in check.tests}
        for line in check.failures:
            if line not in listed:  # a record's checks, or what kept the suite from running
                ElementTree.SubElement(_case(suite, where, check.suite), "failure", message=_plain(line))
                count += 1
        if check.not_run:
            ElementTree.SubElement(_case(suite, where, check.suite), "skipped", message=_plain(check.not_run))
            count, skipped = count + 1, skipped + 1
        elif not check.tests and check.passed:
            _case(suite, where, f"{check.suite} ({check.passed} checks)")
            count += 1
        suite.set("tests", str(count))
        suite.set("skipped", str(skipped))
        suite.set("failures", str(len(suite.findall("testcase/failure"))))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: ElementTree.Element, where: str, name: str, seconds: float = 0.0) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname=where, name=_plain(name), time=f"{seconds:.3f}")


def _plain(text: str) -> str:
    return NO_XML.sub("?", text)


def merged(runs: Sequence[Sequence[Check]]) -> list[Check]:
    """Put repeated runs of the same checks together; failures and tests say which run they are of."""
    if len(runs) == 1:
        return list(runs[0])
    together: dict[tuple[str, str, str], Check] = {}
    for number, checks in enumerate(runs, start=1):
        for check in checks:
            key = (check.kind, check.name, check.suite)
            whole = together.setdefault(key, Check(*key, not_run=check.not_run))
            whole.passed += check.passed
            whole.not_applicable += [line for line in check.not_applicable if line not in whole.not_applicable]
            renamed: dict[str, str] = {}
            for test in check.tests:
                before = f"{test.name}: {test.reason}"
                test.name = f"{test.name} (run {number})"
                renamed[before] = f"{test.name}: {test.reason}"
                whole.tests.append(test)
            whole.failures += [renamed.get(line, f"run {number}: {line}") for line in check.failures]
    return list(together.values())
