"""What all suites share: which record is tested, with which options, and that its tests are unchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pydantic import BaseModel

from chatlearn_core.plugins.import_string import resolve_import_string
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.records import Kind, PluginRecord
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.plugins.requirements import installed_where
from chatlearn_testing.guard import suite_violations

ReferenceLoader = Callable[[Path], torch.nn.Module]
"""Loads a model directory as a plain module, ``forward(token_ids [T]) -> logits [T, V]`` in float32 with gradients, by
code that is not under test; ``parameters()`` holds tied weights once."""


@cache
def installed_plugins() -> PluginRegistry:
    """What is installed, found once a process."""
    return discover_plugins()


@cache
def selected(kind: Kind, name: str, where: str, python: str | None) -> PluginRecord:
    """An installed plugin whose engine is there, in the interpreter ``python`` if it can run in another one."""
    plugins = installed_plugins()
    record = plugins.select(kind, name, where, installed=None)
    return plugins.select(kind, name, where, installed=installed_where(record, {"python": python}))


class ConformanceSuite:
    """Base of the suites. What a subclass may set is in ``settable``; the rest is the contract.

    What a backend must be able to do follows from its record, the one its plugin registers: to leave a test out is to
    declare less, which users see in ``chatlearn plugins list``.
    """

    settable: ClassVar[frozenset[str]] = frozenset({"backend", "options"})
    kind: ClassVar[Kind]
    backend: ClassVar[str | PluginRecord]
    """Name of an installed plugin, or a record that no plugin registers (a fake)."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Options of the backend, as a configuration would give them."""
    patience_s: ClassVar[float] = 120.0
    """How long anything may take before it counts as hanging."""

    @classmethod
    def record(cls) -> Any:
        """The record under test.

        Raises:
            PluginError: no such plugin is installed.
        """
        if isinstance(cls.backend, str):
            return selected(cls.kind, cls.backend, f"{cls.__name__}.backend", cls.options.get("python"))
        return cls.backend

    @classmethod
    def options_model(cls) -> type[BaseModel]:
        """The pydantic model that the record names."""
        model: type[BaseModel] = resolve_import_string(cls.record().options)
        return model

    @classmethod
    def make_options(cls, **preferred: Any) -> BaseModel:
        """Options of the subclass over ``preferred`` ones, of which those the backend does not know are left out."""
        fields = cls.options_model().model_fields
        known = {name: value for name, value in preferred.items() if name in fields}
        return cls.options_model()(**(known | dict(cls.options)))

    @classmethod
    def build(cls, attribute: str = "factory") -> Callable[..., Any]:
        """The record's code."""
        factory: Callable[..., Any] = resolve_import_string(getattr(cls.record(), attribute))
        return factory

    @pytest.fixture(autouse=True)
    def _one_thread(self) -> Any:
        """Tiny tensors are slower on several threads, and equal bit for bit only on the same number."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)

    def test_no_contract_test_is_overridden(self) -> None:
        """A subclass sets the attributes in ``settable`` and may add tests of its own; it changes no other."""
        assert not (lines := suite_violations(type(self))), "\n".join(lines)

    def test_record_is_the_one_that_is_registered(self) -> None:
        """A record given as an object must not differ from what the plugin of that name registers."""
        record = self.record()
        assert record.kind == self.kind, f"{record.name!r} is a {record.kind}; this is the suite for a {self.kind}"
        registered = [r for r in installed_plugins().records(self.kind) if r.name == record.name]
        assert not registered or registered == [record], f"{record} is tested, {registered[0]} is registered"

    def test_options_are_described_and_strict(self) -> None:
        """An unknown option is an error, so that a misspelled one is not ignored: ``ConfigDict(extra="forbid")``."""
        with pytest.raises(ValueError, match="no_such_option"):
            self.options_model()(**dict(self.options), no_such_option=1)
