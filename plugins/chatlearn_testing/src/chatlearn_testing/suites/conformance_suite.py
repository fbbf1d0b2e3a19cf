"""Base class of all suites: selects the record and options under test, and checks that no test is overridden."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pydantic import BaseModel

from chatlearn_core.plugins.exits import CODE_FIELDS
from chatlearn_core.plugins.import_string import resolve_import_string
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.records import Kind, PluginRecord
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.plugins.requirements import installed_where
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.guard import suite_violations
from chatlearn_testing.leftovers import written_files
from chatlearn_testing.process_state import RANDOM_STATES, ProcessWatch, StateWatch, other_random_state

UNUSUAL_SEED = 93_187
"""Of the random states under which code must change none: code that seeds them would choose 0 or the like."""
ReferenceLoader = Callable[[Path], torch.nn.Module]
"""Function that loads a model directory as a plain module with code that is not under test. The module computes
``forward(token_ids [T]) -> logits [T, V]`` in float32 with gradients; its ``parameters()`` yield tied weights once.
"""


@cache
def installed_plugins() -> PluginRegistry:
    """Return the installed plugins; discovers them once per process."""
    return discover_plugins()


@cache
def selected(kind: Kind, name: str, where: str, python: str | None) -> PluginRecord:
    """Select an installed plugin whose engine is installed too, here or in the interpreter ``python``."""
    plugins = installed_plugins()
    record = plugins.select(kind, name, where, installed=None)
    return plugins.select(kind, name, where, installed=installed_where(record, {"python": python}))


@contextmanager
def nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Fail if the block prints to standard output, which belongs to the command that runs."""
    capfd.readouterr()
    yield
    assert not (printed := capfd.readouterr().out), f"printed to standard output: {printed[:200]!r}"


@contextmanager
def nothing_changes(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Fail if the block prints to standard output, writes a file, or changes state that the process shares."""
    with nothing_is_printed(capfd), written_files() as written:
        watch = StateWatch()
        yield
        changed = watch.changed_state()
    assert not changed, f"changed: {'; '.join(changed)}"
    assert not written, f"written: {', '.join(sorted(written)[:5])}"


class ConformanceSuite:
    """Base of the suites. A subclass may set the attributes in ``settable``; all others are part of the contract.

    The record that the plugin registers decides which tests apply. To omit a test, a plugin must declare less, and
    ``chatlearn plugins list`` shows that to users.
    """

    settable: ClassVar[frozenset[str]] = frozenset({"backend", "options", "engine_state"})
    kind: ClassVar[Kind]
    backend: ClassVar[str | PluginRecord]
    """Name of an installed plugin, or a record that no plugin registers (a fake)."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Options of the backend, as a configuration would give them."""
    engine_state: ClassVar[frozenset[str]] = frozenset()
    """State of the process that a third-party engine (``requires`` of the record) changes as it starts, in the words of
    the failed test: ``"the environment: OMP_NUM_THREADS"``, ``"the search path of modules (sys.path)"``."""
    options_field: ClassVar[str | None] = "options"
    """Field of the record that names the pydantic model of its options; None: records of this kind have none."""
    patience_s: ClassVar[float] = 120.0
    """Time limit of each operation under test, seconds; an operation that exceeds it counts as hanging."""

    @classmethod
    def record(cls) -> Any:
        """Return the record under test.

        Raises:
            PluginError: no plugin of that name is installed.
        """
        if isinstance(cls.backend, str):
            return selected(cls.kind, cls.backend, f"{cls.__name__}.backend", cls.options.get("python"))
        return cls.backend

    @classmethod
    def options_model(cls) -> type[BaseModel]:
        """Return the pydantic model that the record names in ``options_field``."""
        assert cls.options_field is not None, f"a {cls.kind} has no options"
        model: type[BaseModel] = resolve_import_string(getattr(cls.record(), cls.options_field))
        return model

    @classmethod
    def make_options(cls, **preferred: Any) -> BaseModel:
        """Build options: those of the subclass override ``preferred``, of which only existing fields are used."""
        fields = cls.options_model().model_fields
        known = {name: value for name, value in preferred.items() if name in fields}
        return cls.options_model()(**(known | dict(cls.options)))

    @classmethod
    def build(cls, attribute: str = "factory") -> Callable[..., Any]:
        """Import the code that an attribute of the record names."""
        factory: Callable[..., Any] = resolve_import_string(getattr(cls.record(), attribute))
        return factory

    may_change: ClassVar[frozenset[str]] = frozenset()
    """State of the process (``process_state``) that a backend of this kind may change while a test runs."""
    shares_backends: ClassVar[bool] = False
    """Whether tests share a backend, whose threads then outlive a test."""

    @classmethod
    def ignored_state(cls) -> frozenset[str]:
        """State of the process, as ``changes`` names it, that may change while a test runs."""
        assert not cls.engine_state or cls.record().requires, (
            f"{cls.record().name!r} requires no engine (requires of its record), so it may not set engine_state"
        )
        return cls.may_change | cls.engine_state

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _the_suite_leaves_nothing(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        """Fail the last test if the suite's backends left anything behind, after all of them were closed.

        A backend may change random states as it is set up, and what only the first import of an engine changes.
        """
        if cls.record().requires:  # what the import of a third-party engine changes is not the plugin's
            for attribute in (name for name in CODE_FIELDS if hasattr(cls.record(), name)):
                resolve_import_string(getattr(cls.record(), attribute))
        watch = ProcessWatch(ignored=RANDOM_STATES | cls.ignored_state(), watches_ports=not cls.record().requires)
        with written_files() as written:
            yield
        gc.collect()  # errors of failed syncs hold their ends in cycles
        left = watch.left_behind()
        assert not left, f"left behind by the suite's backends: {'; '.join(left)}"
        temporary = str(tmp_path_factory.getbasetemp())
        files = sorted(file for file in written if not file.startswith(temporary) and Path(file).exists())
        assert not files, f"files left behind by the suite's backends: {', '.join(files[:5])}"
        changed = watch.changed_state()
        assert not changed, f"changed for all code of the process: {'; '.join(changed)}"

    @pytest.fixture(autouse=True)
    def _the_test_leaves_the_process_alone(self, _one_thread: None) -> Iterator[None]:
        """Fail a test that changes state which all code of the process shares, or leaves a thread.

        Seeds: use a generator of your own. Environment, working directory, handlers, search path, limits, levels,
        functions of the standard library: they belong to the run and to the other plugins beside yours.
        """
        with other_random_state(UNUSUAL_SEED):
            watch = StateWatch(ignored=self.ignored_state())
            yield
            changed = watch.changed_state()
        assert not changed, f"changed for all code of the process: {'; '.join(changed)}"
        if not self.shares_backends:
            threads = watch.threads_left()
            assert not threads, f"outlive the test: {', '.join(threads)}"

    @contextmanager
    def nothing_is_left(self, kept: Path | None = None) -> Iterator[None]:
        """Fail if a process, thread, port, shared memory or file of the block outlives it; ``kept`` may hold files."""
        with written_files() as written:
            watch = ProcessWatch(watches_ports=not self.record().requires)
            yield
            left = watch.left_behind()
        assert not left, f"outlive close: {'; '.join(left)}"
        files = sorted(file for file in written if Path(file).exists())
        outside = [file for file in files if kept is None or not Path(file).is_relative_to(kept)]
        assert not outside, f"files outlive close: {', '.join(outside[:5])}"

    @pytest.fixture
    def _one_thread(self) -> Iterator[None]:
        """Use one thread: it is fastest for tiny tensors, and bit-identical results need equal numbers of threads."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)

    def test_no_contract_test_is_overridden(self) -> None:
        """A subclass may set the attributes in ``settable`` and add tests; it must not change any other attribute."""
        assert not (lines := suite_violations(type(self))), "\n".join(lines)

    def test_record_is_the_one_that_is_registered(self) -> None:
        """A record given as an object must equal the one that the installed plugin of that name registers."""
        record = self.record()
        assert record.kind == self.kind, f"{record.name!r} is a {record.kind}; this is the suite for a {self.kind}"
        registered = [r for r in installed_plugins().records(self.kind) if r.name == record.name]
        assert not registered or registered == [record], f"{record} is tested, but {registered[0]} is registered"

    def test_options_are_described_and_strict(self) -> None:
        """An unknown option raises, so that no misspelled option is ignored: set ``ConfigDict(extra="forbid")``."""
        if self.options_field is None:
            not_applicable(f"records of the kind {self.kind} have no options")
        with pytest.raises(ValueError, match="no_such_option"):
            self.options_model()(**dict(self.options), no_such_option=1)
