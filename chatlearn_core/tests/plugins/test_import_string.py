from __future__ import annotations

import collections

import pytest

from chatlearn_core.plugins.import_string import import_string_problem, resolve_import_string


@pytest.mark.parametrize("text", ["collections:OrderedDict", "os.path:join", "pathlib:Path.cwd"])
def test_import_strings(text: str) -> None:
    assert import_string_problem(text) is None
    assert callable(resolve_import_string(text))


def test_it_gives_the_object_itself() -> None:
    assert resolve_import_string("collections:OrderedDict") is collections.OrderedDict


@pytest.mark.parametrize(
    "text", ["", ":", "os", "os:", ":join", "os.path.join", "os/path:join", "os:jo in", "a..b:c", 3]
)
def test_what_is_no_import_string(text: object) -> None:
    problem = import_string_problem(text)
    assert problem is not None
    assert repr(text) in problem


def test_a_malformed_string_is_refused_before_anything_is_imported() -> None:
    with pytest.raises(ValueError, match="not an import string"):
        resolve_import_string("antigravity")


def test_a_missing_module() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        resolve_import_string("no_such_module:Thing")


def test_a_missing_attribute_names_module_and_attribute() -> None:
    with pytest.raises(ImportError, match=r"module 'os' has no attribute 'Thing\.part'"):
        resolve_import_string("os:Thing.part")
