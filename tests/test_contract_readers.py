"""Every record field and protocol method has a reader in production code.

A reader is an attribute access on something other than ``self``, or ``getattr`` with the name, in the source of a
distribution other than the testing kit. What a plugin passes when it makes a record is no reader of it.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import chatlearn_core.protocols
from chatlearn_core.plugins import records
from chatlearn_core.plugins.records import RECORD_TYPES, PluginRecord

ROOT = Path(__file__).parents[1]
BY_NAME = ("getattr", "hasattr", "load_callable")
"""Functions that look an attribute up by the name they are given."""
KIT = ("chatlearn_testing", "testing", "template", "templates")
"""Folders whose code checks contracts instead of using them."""


def source_files() -> Iterator[Path]:
    for folder in sorted([*ROOT.glob("chatlearn_*/src"), *ROOT.glob("plugins/chatlearn_*/src")]):
        for file in sorted(folder.rglob("*.py")):
            if not set(file.relative_to(ROOT).parts) & set(KIT):
                yield file


def names_read(tree: ast.AST) -> Iterator[str]:
    """Names of attributes that the code looks up on anything but ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
            yield from (str(arg.value) for arg in node.args[1:2] if isinstance(arg, ast.Constant))


@pytest.fixture(scope="module")
def read() -> frozenset[str]:
    """Every name that production code reads."""
    return frozenset(name for file in source_files() for name in names_read(ast.parse(file.read_text("utf-8"))))


def record_fields() -> list[tuple[str, str]]:
    return sorted(
        {
            (record.__name__, field.name)
            for record in {PluginRecord, *RECORD_TYPES.values()}
            for field in dataclasses.fields(record)
        }
    )


def protocol_modules() -> list[ModuleType]:
    folder = Path(inspect.getfile(chatlearn_core.protocols)).parent
    return [
        __import__(f"chatlearn_core.protocols.{file.stem}", fromlist=["*"])
        for file in sorted(folder.glob("*.py"))
        if file.stem != "__init__"
    ]


def protocol_members() -> list[tuple[str, str]]:
    members: set[tuple[str, str]] = set()
    for module in protocol_modules():
        for _, protocol in inspect.getmembers(module, inspect.isclass):
            if protocol.__module__ == module.__name__ and getattr(protocol, "_is_protocol", False):
                members |= {(protocol.__name__, name) for name in vars(protocol) if not name.startswith("_")}
    return sorted(members)


@pytest.mark.parametrize(("record", "field"), record_fields())
def test_production_code_reads_every_field_of_a_record(record: str, field: str, read: frozenset[str]) -> None:
    assert field in read, f"{record}.{field} is declared in {records.__name__}, and no production code reads it"


@pytest.mark.parametrize(("protocol", "member"), protocol_members())
def test_production_code_uses_every_member_of_a_protocol(protocol: str, member: str, read: frozenset[str]) -> None:
    assert member in read, f"{protocol}.{member} is part of a protocol, and no production code uses it"


def test_a_name_that_only_its_own_object_reads_has_no_reader() -> None:
    """The rule itself: this is what a dead contract looks like."""
    code = "class A:\n    def f(self):\n        return self.dead + other.alive + getattr(other, 'asked')\n"
    assert set(names_read(ast.parse(code))) == {"alive", "asked"}
