"""Checks that a subclass of a conformance suite sets only permitted attributes and overrides no contract test."""

from __future__ import annotations

from typing import Any

SUITES_PACKAGE = "chatlearn_testing.suites"
_ALWAYS_ALLOWED = frozenset({"__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__"})
_HIDING_MARKS = frozenset({"skip", "xfail"})


def is_suite_class(candidate: object) -> bool:
    """Whether ``candidate`` is a subclass of one of the kit's suites, defined outside the kit."""
    return isinstance(candidate, type) and bool(_suites(candidate)) and not _is_ours(candidate)


def suite_violations(cls: type) -> list[str]:
    """Return one line for each way in which a subclass would let a backend pass without conforming; empty if none."""
    lines: list[str] = []
    contract: dict[str, type] = {}
    settable: set[str] = set()
    for suite in reversed(_suites(cls)):
        settable |= set(suite.__dict__.get("settable", ()))
        contract.update({name: suite for name in suite.__dict__ if name not in _ALWAYS_ALLOWED})
    for owner in cls.__mro__:
        if owner is object or _is_ours(owner):
            continue
        for name, value in owner.__dict__.items():
            if name in contract and name not in settable:
                what = "removes" if value is None else "overrides"
                lines.append(
                    f"{owner.__name__} {what} {contract[name].__name__}.{name}, which is part of the contract; a"
                    f" subclass may set only {', '.join(sorted(settable))}"
                )
    lines += [
        f"{cls.__name__} is marked '{mark.name}', which would hide failures; remove the mark"
        for mark in _marks(cls)
        if mark.name in _HIDING_MARKS
    ]
    return lines


def _suites(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if _is_ours(base)]


def _is_ours(cls: type) -> bool:
    return cls.__module__.startswith(SUITES_PACKAGE)


def _marks(cls: type) -> list[Any]:
    found = getattr(cls, "pytestmark", [])
    return list(found) if isinstance(found, list | tuple) else [found]
