"""The contract of a launcher: every process of a cluster learns its part from its own environment variables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import pytest

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.plugins.records import Kind
from chatlearn_core.protocols import NodePart
from chatlearn_testing.leftovers import written_files
from chatlearn_testing.suites.conformance_suite import ConformanceSuite, nothing_changes

Environment = Mapping[str, str]
SHELL: Environment = MappingProxyType(
    {"HOME": "/home/user", "HOSTNAME": "login-1", "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin", "SHLVL": "1"}
)
"""Variables of a login shell, which no launcher started."""
NO_NUMBERS = ("one", "-1", "1.5", "0x1", "²", "٣", "٧", " 1", "+1", "1_0")
"""Texts that Python reads as numbers are among them, as far as no launcher writes such a number."""
LARGE = "100000"


@dataclass(slots=True, frozen=True)
class LauncherCase:
    """A cluster as the launcher starts it: the environment variables of every process, and what they mean."""

    nodes: Sequence[Sequence[Environment]]
    """For each node, in the order of ranks, the variables of its processes in the order of local ranks."""
    head: str
    """Expected host name or address of the head."""
    optional: frozenset[str] = field(default_factory=frozenset)
    """Variables that the launcher reads if they are there; all others that it reads must be there."""

    def processes(self) -> Iterator[tuple[Environment, NodePart]]:
        """Every process with its expected part."""
        for rank, processes in enumerate(self.nodes):
            for local_rank, environment in enumerate(processes):
                yield environment, NodePart(rank, len(self.nodes), self.head, local_rank)


class LauncherConformance(ConformanceSuite):
    """Contract tests that every launcher must pass.

    A subclass sets ``backend`` and ``cases``, and ``foreign`` to environments of other launchers.
    """

    kind: ClassVar[Kind] = "launcher"
    settable: ClassVar[frozenset[str]] = frozenset({"backend", "cases", "foreign"})
    options_field: ClassVar[str | None] = None
    cases: ClassVar[Sequence[LauncherCase]]
    foreign: ClassVar[Sequence[Environment]] = ()
    """Environments of processes that this launcher did not start."""

    def test_cases_can_tell_right_from_wrong(self) -> None:
        """A case has at least two nodes, so that a constant part is noticed, and its processes have what the record's
        ``recognised_by`` names.
        """
        assert any(len(case.nodes) >= 2 for case in self.cases), "set a case with at least two nodes"
        recognised_by = self.record().recognised_by
        assert recognised_by, "the record's recognised_by is empty; name the variables of every process"
        for environment, _ in self._processes():
            missing = [name for name in recognised_by if name not in environment]
            assert not missing, f"a process of a case lacks {', '.join(missing)} of the record's recognised_by"

    def test_every_process_learns_its_part(self) -> None:
        """Rank, number of nodes, head and local rank are those of the cases."""
        for environment, expected in self._processes():
            found = self._part(environment)
            assert isinstance(found, NodePart), f"{found!r} is no NodePart, for {dict(environment)}"
            assert found == expected, f"{found} instead of {expected}, for {dict(environment)}"

    def test_a_cluster_has_one_head(self) -> None:
        """The ranks of the nodes are 0 to n-1, each once, and all processes agree about head and number of nodes."""
        for index, case in enumerate(self.cases):
            parts = [[self._part(environment) for environment in processes] for processes in case.nodes]
            ranks = [{getattr(part, "rank", None) for part in processes} for processes in parts]
            assert ranks == [{rank} for rank in range(len(ranks))], f"case {index}: the nodes have the ranks {ranks}"
            every = [part for processes in parts for part in processes]
            for what in ("num_nodes", "head"):
                values = {getattr(part, what, None) for part in every}
                assert len(values) == 1, f"case {index}: the processes disagree about {what}: {values}"

    def test_other_environments_are_none_of_its_own(self) -> None:
        """An empty environment, a login shell and the processes of other launchers give None, not an error."""
        for environment in ({}, SHELL, *self.foreign):
            found = self._part(environment)
            assert found is None, f"{found} for {dict(environment)}, which this launcher did not set"

    def test_it_is_recognised_as_declared(self) -> None:
        """Without any one of the variables in the record's ``recognised_by`` the process is not this launcher's."""
        for environment, _ in self._processes():
            for name in self.record().recognised_by:
                found = self._part(_without(environment, name))
                assert found is None, f"{found} without {name}, which the record's recognised_by names"

    def test_a_missing_variable_is_named(self) -> None:
        """A variable that is missing or empty is a ``ConfigError`` with its name, unless the part does not depend on
        it. Nothing is guessed.
        """
        declared = set(self.record().recognised_by)
        for case in self.cases:
            for environment, expected in case.processes():
                for name in environment.keys() - case.optional - declared:
                    self._assert_refused(_without(environment, name), expected, name, f"{name} is missing")
                for name in environment:
                    changed = {**environment, name: ""}
                    self._assert_refused(changed, expected, name, f"{name} is empty", or_none=name in declared)

    def test_an_optional_variable_may_be_missing(self) -> None:
        """Without a variable that a case calls optional, rank, number of nodes and head are the same."""
        for case in self.cases:
            for environment, expected in case.processes():
                for name in case.optional & environment.keys():
                    found = self._part(_without(environment, name))
                    assert isinstance(found, NodePart), f"{found} without {name}, which is optional"
                    known = (found.rank, found.num_nodes, found.head)
                    assert known == (expected.rank, expected.num_nodes, expected.head), f"{found} without {name}"

    def test_what_is_no_number_is_named(self) -> None:
        """A text in place of a number is a ``ConfigError`` with the variable's name."""
        for environment, expected in self._processes():
            for name in _numbers(environment):
                for text in NO_NUMBERS:
                    changed = {**environment, name: text}
                    self._assert_refused(changed, expected, name, f"{name} is {text!r}")

    def test_ranks_out_of_range_are_refused(self) -> None:
        """A rank that is not smaller than the number of nodes is a ``ConfigError`` with the variable's name."""
        for environment, _ in self._processes():
            for name in _numbers(environment):
                for text in ("0", LARGE):
                    found = self._part_or_error({**environment, name: text})
                    if isinstance(found, ConfigError):
                        assert name in str(found), f"{name} is {text}, and the error does not name it: {found}"
                        continue
                    assert isinstance(found, NodePart), f"{found} where {name} is {text}"
                    assert 0 <= found.rank < found.num_nodes, f"{found} where {name} is {text}"

    def test_it_reads_the_given_variables_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The part depends on the argument, not on ``os.environ`` or an earlier call, and no file is written."""
        for case in self.cases:
            processes = list(case.processes())
            for (environment, expected), (other, _) in zip(processes, reversed(processes), strict=True):
                with monkeypatch.context() as patch, written_files() as written:
                    for name in environment:
                        patch.setenv(name, other.get(name, "other"))
                    found = self._part(environment)
                    nothing = self._part({})
                assert found == expected, f"{found} instead of {expected} where os.environ has other values"
                assert nothing is None, "an empty environment is not None where os.environ has the variables"
                assert not written, f"files were written: {', '.join(sorted(written))}"

    def test_the_environment_is_read_only(self) -> None:
        """Neither the mapping nor ``os.environ`` is changed."""
        before = dict(os.environ)
        for environment, expected in self._processes():
            given = dict(environment)
            assert self._function()(given) == expected
            assert given == environment, "the given variables were changed"
            assert self._function()(MappingProxyType(given)) == expected, "it needs more than a Mapping"
        assert dict(os.environ) == before, "os.environ was changed"

    def test_the_process_stays_as_it_was(self, capfd: pytest.CaptureFixture[str]) -> None:
        """Nothing is printed to standard output or written, and what all code of the process shares is unchanged."""
        with nothing_changes(capfd):
            for environment, _ in self._processes():
                self._part(environment)

    # Inside

    def _function(self) -> Callable[[Environment], Any]:
        return self.build("function")

    def _part(self, environment: Environment) -> Any:
        return self._function()(dict(environment))

    def _part_or_error(self, environment: Environment) -> Any:
        try:
            return self._part(environment)
        except ConfigError as error:
            return error

    def _processes(self) -> Iterator[tuple[Environment, NodePart]]:
        for case in self.cases:
            yield from case.processes()

    def _assert_refused(
        self, environment: Environment, expected: NodePart, name: str, what: str, or_none: bool = False
    ) -> None:
        """Check that a wrong variable is an error that names it, or is none that the part depends on."""
        found = self._part_or_error(environment)
        if isinstance(found, ConfigError):
            assert name in str(found), f"{what}, and the error does not name it: {found}"
        else:
            unchanged = found == expected or (or_none and found is None)
            assert unchanged, f"{what}, and the part is {found}, not a ConfigError"


def _without(environment: Environment, name: str) -> dict[str, str]:
    return {other: value for other, value in environment.items() if other != name}


def _numbers(environment: Environment) -> list[str]:
    """Variables whose value is a whole number."""
    return [name for name, value in environment.items() if value.isdecimal()]
