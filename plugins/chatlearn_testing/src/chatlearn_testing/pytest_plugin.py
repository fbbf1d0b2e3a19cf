"""The pytest plugin of chatlearn-testing, loaded through the entry point ``pytest11``.

Every pytest run in an environment with chatlearn-testing pays for it, so it imports nothing heavy. It registers the
kit's markers, offers fixtures, and refuses to collect a conformance suite whose contract tests were overridden.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from chatlearn_testing.guard import SUITES_PACKAGE, is_suite_class, suite_violations

if TYPE_CHECKING:
    from chatlearn_core.plugins.registry import PluginRegistry
    from chatlearn_testing.fake_environment import FakeEnvironment
    from chatlearn_testing.leftovers import Leftovers

MARKERS = (
    "engine: runs a real engine (trainer or generator)",
    "gpu: needs a CUDA device",
    "slow: takes long",
)

# Their assertions are explained by pytest like those of a test module.
pytest.register_assert_rewrite(SUITES_PACKAGE)


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers that the suites use."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)


def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str, obj: object) -> None:
    """Fail the collection of a suite that was tampered with, naming what was."""
    if is_suite_class(obj) and isinstance(obj, type) and (lines := suite_violations(obj)):
        raise collector.CollectError("\n".join(["This conformance suite would prove nothing:", *lines]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Print the rule, and what usually breaks it, with a contract test that fails."""
    report = yield
    function = getattr(item, "function", None)
    if report.failed and is_suite_class(getattr(item, "cls", None)) and function is not None and function.__doc__:
        report.sections.append((f"contract: {function.__name__}", inspect.cleandoc(function.__doc__)))
    return report


@pytest.fixture(scope="session")
def chatlearn_registry() -> PluginRegistry:
    """Every plugin that is installed, as a run would find it."""
    from chatlearn_core.plugins.loader import discover_plugins

    return discover_plugins()


@pytest.fixture(scope="session")
def tiny_prompts() -> tuple[tuple[int, ...], ...]:
    """Token ids of a few short prompts, valid for any vocabulary of 32 tokens or more."""
    return ((5, 9, 3), (17, 2, 30, 11, 8), (4,), (21, 21, 6, 13, 19, 7, 25))


@pytest.fixture
def leaves_nothing() -> Iterator[Leftovers]:
    """Fails a test that leaves processes, shared memory or listening ports behind."""
    from chatlearn_testing.leftovers import Leftovers

    with Leftovers() as leftovers:
        yield leftovers


@pytest.fixture
def fake_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEnvironment]:
    """An empty site-packages, on this process's ``sys.path`` too; its modules are forgotten afterwards."""
    from chatlearn_testing.fake_environment import FakeEnvironment

    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delenv("CHATLEARN_DISABLE_PLUGINS", raising=False)
    yield FakeEnvironment(site)
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(site)):
            del sys.modules[name]
