from typing import Literal

import pytest
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from chatlearn_config.validation import problems_of


class Inner(BaseModel, extra="forbid"):
    warmup_steps: int = 0


class Options(BaseModel, extra="forbid"):
    path: str = Field(description="Where it is.")
    mode: Literal["fast", "slow"] = "fast"
    either: int | list[int] = 1
    inner: Inner = Inner()
    even: int = 0
    low: int = 0
    high: int = 1

    @field_validator("even")
    @classmethod
    def is_even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("must be even")
        return value

    @model_validator(mode="after")
    def ordered(self) -> "Options":
        if self.low > self.high:
            raise ValueError("low must not be above high")
        return self


def told(values: dict) -> list[tuple[tuple, str, str]]:
    with pytest.raises(ValidationError) as caught:
        Options.model_validate(values, strict=True)
    problems = problems_of(caught.value, Options, values, ("roles", "a", "options"))
    return [(problem.path[3:], problem.rule, problem.remedy) for problem in problems]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, (("path",), "required key is missing", "Where it is.")),
        ({"path": "x", "mode": "fats"}, (("mode",), "must be 'fast' or 'slow'", "did you mean 'fast'?")),
        ({"path": "x", "even": 3}, (("even",), "must be even", "")),
        ({"path": "x", "low": 3}, ((), "low must not be above high", "")),
        ({"path": "x", "inner": 3}, (("inner",), "must be a mapping of keys to values", "")),
        (
            {"path": "x", "inner": {"warmup": 1}},
            (("inner", "warmup"), "unknown key", "did you mean 'warmup_steps'?\nvalid keys: warmup_steps"),
        ),
        # both branches of the union, one problem
        ({"path": "x", "either": "many"}, (("either",), "must be a valid integer; or must be a list", "")),
    ],
)
def test_problems(values: dict, expected: tuple) -> None:
    (found,) = told(values)
    assert found == expected


def test_all_at_once() -> None:
    assert [path for path, _, _ in told({"mode": 1, "inner": {"x": 1}, "even": 1})] == [
        ("path",),
        ("mode",),
        ("inner", "x"),
        ("even",),
    ]


class Lists(BaseModel):
    sizes: tuple[int, ...] = Field((1,), min_length=1)
    names: frozenset[str] = Field(frozenset("ab"), min_length=2)


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"sizes": ["large"]}, ("sizes", 0)),
        ({"sizes": []}, ("sizes",)),
        ({"names": ["a", "a"]}, ("names",)),  # enough were given, but no item is bad
    ],
)
def test_items_that_are_bad_are_not_missing_as_well(values: dict, place: tuple) -> None:
    with pytest.raises(ValidationError) as caught:
        Lists.model_validate(values)
    assert [problem.path for problem in problems_of(caught.value, Lists, values)] == [place]
