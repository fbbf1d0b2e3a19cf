"""Interpolations that become too large are refused before one is replaced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from pydantic import BaseModel

from chatlearn_config.interpolation import resolve as resolve_for
from chatlearn_config.problems import KeyPath, Problem


class Settings(BaseModel):
    """None has a default."""


def resolve(values: Mapping[str, object]) -> tuple[dict[Any, Any], list[Problem], list[KeyPath]]:
    return resolve_for(values, Settings)


def doubling(levels: int) -> dict[str, object]:
    return {f"k{level}": f"${{k{level + 1}}}${{k{level + 1}}}" for level in range(levels)} | {f"k{levels}": "x" * 10}


def test_a_text_that_doubles_forty_times_is_refused() -> None:
    values, problems, paths = resolve(doubling(40))
    assert "would become longer than 200000 characters" in problems[0].rule
    assert ("k0",) in paths
    assert "k0" not in values
    assert values["k32"] == "x" * 10 * 2**8, "what stays small is resolved"


def test_lists_that_double_are_refused() -> None:
    lists: dict[str, object] = {f"k{level}": [f"${{k{level + 1}}}"] * 2 for level in range(40)}
    _, problems, _ = resolve(lists | {"k40": [1, 2]})
    assert any("would become longer" in problem.rule for problem in problems)


@pytest.mark.parametrize("text", ["${name}" * 100_000, "${name" * 20_000, "x" * 700_000 + "${oc.env:HOME}"])
def test_a_long_text_with_an_interpolation_is_refused(text: str) -> None:
    values, problems, _ = resolve({"name": "x", "long": text})
    assert [problem.path for problem in problems] == [("long",)]
    assert "at most 10000 are parsed" in problems[0].rule
    assert values["name"] == "x"


def test_relative_references_and_cycles_end() -> None:
    values, problems, _ = resolve({"a": {"b": "${.c}", "c": "${..d}"}, "d": "x", "e": "${f}", "f": "${e}"})
    assert values["a"] == {"b": "x", "c": "x"}
    assert {problem.path for problem in problems} == {("e",), ("f",)}


def test_long_texts_without_an_interpolation_are_fine() -> None:
    text = "a prompt of its own\n" * 50_000
    assert resolve({"long": text})[0]["long"] == text
