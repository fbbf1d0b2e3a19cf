"""The message of a configuration that breaks rules."""

from __future__ import annotations

from chatlearn_config.problems import Mark, Marks, Problem
from chatlearn_core.config.invalid import InvalidConfigError

MARKS = Marks(
    "run.yaml", {("a",): Mark("run.yaml", 2), ("a", "b"): Mark("run.yaml", 3), ("c",): Mark("override 'c=1'")}
)


def test_the_message_counts_all_problems_and_lists_them_in_order() -> None:
    problems = [Problem(("c",), "third"), Problem(("a", "b"), "second"), Problem(("a",), "first")]
    error = InvalidConfigError("run.yaml", problems, MARKS)
    assert str(error) == (
        "3 problems in run.yaml:\nrun.yaml:2: a: first\nrun.yaml:3: a.b: second\noverride 'c=1': c: third"
    )
    assert [problem.rule for problem in error.problems] == ["first", "second", "third"]
    assert str(InvalidConfigError("run.yaml", problems[:1], MARKS)).startswith("1 problem in run.yaml:")
