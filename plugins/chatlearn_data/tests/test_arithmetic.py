"""Arithmetic word problems: right answers, disjoint splits, a closed vocabulary."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatlearn_core.exceptions import DataError
from chatlearn_data.answers import gsm8k_answer, last_boxed
from chatlearn_data.arithmetic import (
    PIECE,
    Operation,
    Problem,
    check_disjoint,
    demonstration_records,
    problem_of,
    problems,
    prompt_records,
    render,
    solution,
    split_problems,
    vocabulary,
)


def test_every_problem_is_there_once() -> None:
    """n(n + 1)/2 unordered pairs to add; n² differences, one for every second operand and answer."""
    found = problems(max_operand=50, min_operand=1)
    assert len(found) == 50 * 51 // 2 + 50 * 50
    assert len({problem.key for problem in found}) == len(found)
    assert all(1 <= problem.right <= 50 for problem in found)
    assert all(1 <= (p.left if p.operation == "add" else p.answer) <= 50 for p in found)
    assert {problem.operation for problem in problems(["subtract"], 3, 1)} == {"subtract"}


@pytest.mark.parametrize(("operations", "largest"), [(["multiply"], 5), ([], 5), (["add"], 9)])
def test_impossible_requests_are_refused(operations: list[str], largest: int) -> None:
    with pytest.raises(DataError):
        problems(operations, largest)


def test_answers_and_sameness() -> None:
    assert (Problem("add", 12, 7).answer, Problem("subtract", 12, 7).answer) == (19, 5)
    assert Problem("add", 12, 7).key == Problem("add", 7, 12).key
    assert Problem("subtract", 12, 7).key != Problem("subtract", 7, 12).key
    assert Problem("add", 12, 7).key != Problem("subtract", 12, 7).key


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 5))
def test_splits_are_a_partition(validation: int, heldout: int, seed: int) -> None:
    everything = problems(max_operand=15, min_operand=1)
    splits = split_problems(everything, validation=validation, heldout=heldout, seed=seed)
    assert (len(splits.validation), len(splits.heldout)) == (validation, heldout)
    assert Counter([*splits.train, *splits.validation, *splits.heldout]) == Counter(everything)


def test_heldout_problems_do_not_depend_on_the_validation_set() -> None:
    one, two = (split_problems(problems(), validation=n, heldout=100, seed=3).heldout for n in (0, 200))
    assert one == two
    assert one != split_problems(problems(), validation=0, heldout=100, seed=4).heldout


def test_asking_for_too_much_is_refused() -> None:
    with pytest.raises(DataError, match="60 held-out and 60 validation problems leave none of 120"):
        split_problems(problems(["add"], 15, 1), validation=60, heldout=60, seed=0)


def test_check_disjoint_sees_through_the_order_of_a_sum() -> None:
    check_disjoint({"train": [Problem("add", 1, 2)] * 2, "heldout": [Problem("subtract", 2, 1)]})
    with pytest.raises(DataError, match=r"1 \+ 2 is in the splits 'train' and 'heldout'"):
        check_disjoint({"train": [Problem("add", 1, 2)], "heldout": [Problem("add", 2, 1)]})


def test_rows_of_different_splits_share_no_problem_and_answer_themselves() -> None:
    splits = split_problems(problems(max_operand=29), validation=50, heldout=50, seed=0)
    train = list(prompt_records(splits.train, "train", 800, 0))
    heldout = list(prompt_records(splits.heldout, "heldout", 50, 0))
    check_disjoint({"train": map(problem_of, train), "heldout": map(problem_of, heldout)})
    assert {problem_of(row).key for row in heldout} == {problem.key for problem in splits.heldout}
    assert {problem_of(row).key for row in train} == {problem.key for problem in splits.train}
    for row in train:
        problem = problem_of(row)
        question = row["prompt"][0]["content"]
        numbers = [int(number) for number in re.findall(r"\d+", question)]
        assert sorted(numbers) == sorted([problem.left, problem.right])
        expected = sum(numbers) if problem.operation == "add" else max(numbers) - min(numbers)
        assert row["reward_model"]["ground_truth"] == str(expected)
    assert len({row["id"] for row in train}) == 800


def test_demonstrations_end_in_their_answer() -> None:
    members = problems(max_operand=19)
    for row in demonstration_records(members, "sft", 100, 0):
        assert last_boxed(row["completion"]) == row["ground_truth"] == str(problem_of(row).answer)
    for row in demonstration_records(members, "sft", 100, 0, "hash"):
        assert gsm8k_answer(row["completion"]) == row["ground_truth"]


def test_the_same_seed_gives_the_same_rows() -> None:
    members = problems(max_operand=19)
    rows = [list(prompt_records(members, "train", 50, seed)) for seed in (0, 0, 1)]
    assert rows[0] == rows[1] != rows[2]


def test_the_vocabulary_is_closed_and_has_nothing_to_spare() -> None:
    rng = random.Random(0)
    used: set[str] = set()
    for problem in problems(max_operand=29) * 12:
        used.update(PIECE.findall(render(problem, rng)))
        used.update(PIECE.findall(solution(problem)) + PIECE.findall(solution(problem, "hash")))
    words = vocabulary()
    assert used == set(words)
    assert len(words) == len(set(words)) < 200


@pytest.mark.parametrize(
    ("problem", "written"),
    [
        (Problem("add", 23, 18), "23+18:3+8=11,2+1+1=4"),
        (Problem("add", 11, 12), "11+12:1+2=03,1+1+0=2"),
        (Problem("add", 95, 17), "95+17:5+7=12,9+1+1=11"),
        (Problem("subtract", 41, 18), "41-18:11-8=3,4-1-1=2"),
        (Problem("subtract", 48, 13), "48-13:08-3=5,4-1-0=3"),
        (Problem("subtract", 102, 7), "102-7:12-7=5,10-0-1=9,1-0-1=0"),
    ],
)
def test_working_goes_column_by_column(problem: Problem, written: str) -> None:
    assert solution(problem) == f"{written}:\\boxed{{{problem.answer}}}"
    assert solution(problem, "hash") == f"{written}:#### {problem.answer}"
    assert solution(problem, worked=False) == f"\\boxed{{{problem.answer}}}"


@given(st.sampled_from(["add", "subtract"]), st.integers(0, 999), st.integers(0, 999))
def test_the_columns_put_together_are_the_answer(operation: Operation, one: int, other: int) -> None:
    problem = Problem(operation, *((one, other) if operation == "add" else (one + other, other)))
    columns = solution(problem).split(":")[1].split(",")
    results = [column.split("=")[1] for column in columns]
    assert all(_value(column.split("=")[0]) == int(column.split("=")[1]) for column in columns)
    assert int(results[-1] + "".join(result[-1] for result in reversed(results[:-1]))) == problem.answer


def _value(expression: str) -> int:
    """``11-8`` and ``2+1+1``, read from left to right."""
    numbers = [int(number) for number in re.findall(r"\d+", expression)]
    return numbers[0] + (sum(numbers[1:]) if "+" in expression else -sum(numbers[1:]))


def test_worked_shares_go_by_wording() -> None:
    """With shares of 0 and 1 in turn, every second wording always shows its working, and the others never do."""
    rows = list(demonstration_records(problems(["add"], 29), "sft", 600, 0, worked_shares=(0.0, 1.0)))
    for opening, shows_working in (("together", True), ("puts in", False)):
        habits = {":" in row["completion"] for row in rows if opening in row["prompt"][0]["content"]}
        assert habits == {shows_working}
