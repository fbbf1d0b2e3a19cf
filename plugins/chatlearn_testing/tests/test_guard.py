"""The guard names a subclass that would let a backend pass without conforming."""

from __future__ import annotations

from typing import ClassVar

import pytest

from chatlearn_testing.guard import is_suite_class, suite_violations
from chatlearn_testing.suites import RewardConformance, WeightSyncConformance


def subclass(**body: object) -> type:
    return type("Acme", (WeightSyncConformance,), {"backend": "acme", "__module__": "acme.tests", **body})


def test_what_a_suite_lets_a_subclass_set_is_fine() -> None:
    class Acme(RewardConformance):
        backend = "acme"
        options: ClassVar = {"correct": 2.0}
        cases = ()

        def test_of_its_own(self) -> None: ...

    assert is_suite_class(Acme)
    assert suite_violations(Acme) == []


def test_the_suites_themselves_are_not_checked() -> None:
    assert not is_suite_class(WeightSyncConformance)
    assert not is_suite_class(int)
    assert not is_suite_class("a name")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"test_corrupted_files_are_refused": lambda self: None}, "overrides"),
        ({"test_corrupted_files_are_refused": None}, "removes"),
        ({"test_no_contract_test_is_overridden": lambda self: None}, "ConformanceSuite"),
        ({"transport": pytest.fixture(lambda self: None)}, "WeightSyncFixtures.transport"),
        ({"record": classmethod(lambda cls: None)}, "ConformanceSuite.record"),
        ({"settable": frozenset({"record"})}, "settable"),
        ({"pytestmark": pytest.mark.skip(reason="later")}, "'skip'"),
        ({"pytestmark": [pytest.mark.engine, pytest.mark.xfail]}, "'xfail'"),
    ],
)
def test_tampering_is_named(body: dict[str, object], words: str) -> None:
    [line] = suite_violations(subclass(**body))
    assert words in line
    assert "Acme" in line


def test_tampering_between_the_suite_and_the_subclass_is_named_too() -> None:
    between = subclass(test_has_both_ends=lambda self: None)
    lines = suite_violations(type("Acme2", (between,), {"__module__": "acme.tests"}))
    assert lines == [
        "Acme overrides WeightSyncConformance.test_has_both_ends, which is part of the contract; a subclass may set"
        " only backend, channel, engine_state, export, options"
    ]


def test_a_mixin_in_front_of_the_suite_is_seen() -> None:
    class Lenient:
        def test_has_both_ends(self) -> None: ...

    made = type("Acme", (Lenient, WeightSyncConformance), {"backend": "acme", "__module__": "acme.tests"})
    assert "Lenient overrides" in suite_violations(made)[0]
