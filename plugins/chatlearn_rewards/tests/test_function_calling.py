from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

from chatlearn_rewards.function_calling import check_list, check_score, detect_signature, find_function
from chatlearn_rewards.pool_worker import TaskConfigError


@pytest.mark.parametrize(
    ("score", "value", "components"),
    [
        (1, 1.0, {}),
        (True, 1.0, {}),
        (np.float32(0.5), 0.5, {}),
        (torch.tensor(2.0), 2.0, {}),
        (
            {"score": 1.0, "acc": True, "length": 3, "answer": "42", "bad": float("nan")},
            1.0,
            {"acc": 1.0, "length": 3.0},
        ),
    ],
)
def test_scores(score, value, components):
    answer = {"answer": score["answer"]} if isinstance(score, dict) else {}
    assert check_score(score) == {"value": value, "components": components, **answer}


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (None, "no score"),
        (float("nan"), "returned nan; a score must be finite"),
        (float("-inf"), "returned -inf"),
        ("1.0", "returned '1.0' (a str); a score is a number"),
        ([1.0], "returned [1.0] (a list)"),
        ({"reward": 1.0}, "dict without 'score'; its keys are ['reward']"),
        ({"score": None}, "no score"),
        (torch.ones(2), "returned tensor([1., 1.]) (a Tensor)"),
        (10**400, "(a int); a score is a number"),
    ],
)
def test_what_is_no_score(score, message):
    assert message in check_score(score)["error"]


def test_lists():
    assert check_list([1.0, None], 2)[0] == {"value": 1.0, "components": {}}
    assert "no score" in check_list([1.0, None], 2)[1]["error"]
    assert [v["value"] for v in check_list(np.array([1.0, 2.0]), 2)] == [1.0, 2.0]
    assert check_list([1.0], 2) == [{"error": "the function returned 1 scores for 2 samples"}] * 2
    assert "expected a list of 2 scores" in check_list(1.0, 2)[0]["error"]
    assert "expected a list of 2 scores" in check_list("ab", 2)[1]["error"]


def test_signatures_are_told_apart_by_parameter_names():
    def detect(function):
        return detect_signature("m:f", inspect.signature(function).parameters)

    assert detect(lambda data_source, solution_str, ground_truth, extra_info=None: 0) == "compute_score"
    assert detect(lambda solution_str, ground_truth, **kwargs: 0) == "compute_score"
    assert detect(lambda prompts, completions, **columns: 0) == "lists"
    assert detect(lambda completions, answer: 0) == "lists"
    with pytest.raises(TaskConfigError, match=r"'m:f': cannot tell how to call a function of \(a, b\).*'signature'"):
        detect(lambda a, b: 0)


def test_what_is_not_found_is_said_with_the_nearest_name(write_module, tmp_path):
    write_module("scoring.py", "def length_score(): ...\nthreshold = 3\n")
    assert find_function("scoring.py:length_score", tmp_path).__name__ == "length_score"
    assert find_function("scoring:length_score", tmp_path).__name__ == "length_score"
    with pytest.raises(TaskConfigError, match="has no function 'lenght_score'; did you mean 'length_score'"):
        find_function("scoring.py:lenght_score", tmp_path)
    with pytest.raises(TaskConfigError, match=r"there is no file .*scorin.py; did you mean 'scoring.py'"):
        find_function("scorin.py:f", tmp_path)
    with pytest.raises(TaskConfigError, match=r"no module named 'absent_package'.*path/to/file.py:function"):
        find_function("absent_package.rewards:f", tmp_path)
    with pytest.raises(TaskConfigError, match="'threshold' is a int, not a function"):
        find_function("scoring.py:threshold", tmp_path)
