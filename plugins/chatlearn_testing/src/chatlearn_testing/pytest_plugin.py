"""The pytest plugin of chatlearn-testing, loaded through the entry point ``pytest11``.

Every pytest run in an environment with chatlearn-testing imports it, so it imports only light modules. It registers the
kit's markers, provides fixtures, limits the time of contract tests, and fails the collection of a conformance suite
whose contract tests are overridden.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from chatlearn_testing.guard import SUITES_PACKAGE, is_suite_class, suite_violations
from chatlearn_testing.time_limit import time_limit

if TYPE_CHECKING:
    from chatlearn_core.plugins.registry import PluginRegistry
    from chatlearn_testing.fake_environment import FakeEnvironment
    from chatlearn_testing.leftovers import Leftovers

MARKERS = (
    "engine: runs a real engine (trainer or generator)",
    "gpu: needs a CUDA device",
    "slow: takes long",
    "thorough: a longer form of what other tests show",
)

LIMIT_SETTING = "chatlearn_suite_timeout"
LIMIT_S = 600.0
"""Time limit of each phase of a contract test, seconds; the first test of an engine waits for its start."""

# pytest then shows the values in failed assertions of the suites, as it does for test modules.
pytest.register_assert_rewrite(SUITES_PACKAGE)


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers that the suites use."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)


def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str, obj: object) -> None:
    """Fail the collection of a suite whose contract a subclass changes; names each change."""
    if is_suite_class(obj) and isinstance(obj, type) and (lines := suite_violations(obj)):
        raise collector.CollectError("\n".join(["This conformance suite would prove nothing:", *lines]))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting ``chatlearn_suite_timeout``."""
    text = f"Time limit of a contract test's setup, call and teardown, seconds (default: {LIMIT_S:g}); 0: none."
    parser.addini(LIMIT_SETTING, text, default=str(LIMIT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    """Limit the time."""
    with _limit(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Limit the time."""
    with _limit(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """Limit the time."""
    with _limit(item):
        return (yield)


def _limit(item: pytest.Item) -> AbstractContextManager[None]:
    """A limit for a contract test, so that a plugin that hangs fails and the other tests run."""
    if not is_suite_class(getattr(item, "cls", None)) or item.config.getoption("usepdb", False):
        return nullcontext()
    setting = item.config.getini(LIMIT_SETTING)
    try:
        limit_s = float(setting)
    except ValueError:
        raise pytest.UsageError(f"{LIMIT_SETTING} is {setting!r}; it is a number of seconds") from None
    return time_limit(limit_s, lambda reason: pytest.fail(f"{reason} ({LIMIT_SETTING})", pytrace=False))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the docstring of a failed contract test, which states the rule and usual causes, to its report."""
    report = yield
    function = getattr(item, "function", None)
    if report.failed and is_suite_class(getattr(item, "cls", None)) and function is not None and function.__doc__:
        report.sections.append((f"contract: {function.__name__}", inspect.cleandoc(function.__doc__)))
    return report


@pytest.fixture(scope="session")
def chatlearn_registry() -> PluginRegistry:
    """All installed plugins, as a run finds them."""
    from chatlearn_core.plugins.loader import discover_plugins

    return discover_plugins()


@pytest.fixture(scope="session")
def tiny_prompts() -> tuple[tuple[int, ...], ...]:
    """Token ids of a few short prompts, valid for any vocabulary of 32 tokens or more."""
    return ((5, 9, 3), (17, 2, 30, 11, 8), (4,), (21, 21, 6, 13, 19, 7, 25))


@pytest.fixture
def leaves_nothing() -> Iterator[Leftovers]:
    """Fail a test that leaves processes, shared memory or listening ports behind."""
    from chatlearn_testing.leftovers import Leftovers

    with Leftovers() as leftovers:
        yield leftovers


@pytest.fixture
def fake_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEnvironment]:
    """An empty site-packages, also on this process's ``sys.path``; its modules are unloaded after the test."""
    from chatlearn_testing.fake_environment import FakeEnvironment

    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delenv("CHATLEARN_DISABLE_PLUGINS", raising=False)
    yield FakeEnvironment(site)
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(site)):
            del sys.modules[name]
