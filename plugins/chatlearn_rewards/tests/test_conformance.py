"""Every reward passes the conformance suite; ``function`` also with a user's code that misbehaves."""

from __future__ import annotations

from typing import ClassVar

import pytest

from chatlearn_rewards.conformance import ENDPOINT_JUDGE, SETTINGS
from chatlearn_testing.suites import RewardCase, RewardConformance, SampleFilterConformance

MISBEHAVING = """import os
import time


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "hang":
        time.sleep(3600)
    if solution_str == "raise":
        raise RuntimeError("broken on purpose")
    if solution_str == "die":
        os._exit(3)
    return {"nan": float("nan"), "none": None, "text": "one"}.get(solution_str, float(solution_str == ground_truth))
"""


class TestMath(RewardConformance):
    backend = "math"
    options: ClassVar = {"num_workers": 1}
    cases = (
        RewardCase("The answer is \\boxed{\\frac{1}{2}}.", 1.0, ground_truth="0.5"),
        RewardCase("The answer is \\boxed{3}.", 0.0, ground_truth="4"),
    )


class TestGsm8k(RewardConformance):
    backend = "gsm8k"
    cases = (
        RewardCase("3 + 4 = 7\n#### 7", 1.0, ground_truth="7"),
        RewardCase("#### 8", 0.0, ground_truth="7"),
    )


class TestFormat(RewardConformance):
    backend = "format"
    options: ClassVar = {"pattern": "<think>.*</think>.*", "num_workers": 1}
    cases = (RewardCase("<think>a</think>b", 1.0), RewardCase("b", 0.0))


class TestMultipleChoice(RewardConformance):
    backend = "multiple_choice"
    cases = SETTINGS["reward/multiple_choice"]["cases"]


class TestExactMatch(RewardConformance):
    backend = "exact_match"
    options: ClassVar = SETTINGS["reward/exact_match"]["options"]
    cases = SETTINGS["reward/exact_match"]["cases"]


class TestFuzzyMatch(RewardConformance):
    backend = "fuzzy_match"
    options: ClassVar = SETTINGS["reward/fuzzy_match"]["options"]
    cases = SETTINGS["reward/fuzzy_match"]["cases"]


class TestJsonSchema(RewardConformance):
    backend = "json_schema"
    options: ClassVar = SETTINGS["reward/json_schema"]["options"]
    cases = SETTINGS["reward/json_schema"]["cases"]


class TestLength(RewardConformance):
    backend = "length"
    options: ClassVar = SETTINGS["reward/length"]["options"]
    cases = SETTINGS["reward/length"]["cases"]


class TestRepetition(RewardConformance):
    backend = "repetition"
    options: ClassVar = SETTINGS["reward/repetition"]["options"]
    cases = SETTINGS["reward/repetition"]["cases"]


@pytest.mark.slow
class TestCode(RewardConformance):
    backend = "code"
    options: ClassVar = SETTINGS["reward/code"]["options"]
    cases = SETTINGS["reward/code"]["cases"]


class TestJudge(RewardConformance):
    backend = "judge"
    options: ClassVar = SETTINGS["reward/judge"]["options"]
    handles: ClassVar = SETTINGS["reward/judge"]["handles"]
    cases = SETTINGS["reward/judge"]["cases"]


class TestJudgeBehindAnEndpoint(RewardConformance):
    backend = "judge"
    options: ClassVar = ENDPOINT_JUDGE["options"]
    cases = ENDPOINT_JUDGE["cases"]


class TestHttp(RewardConformance):
    backend = "http"
    options: ClassVar = SETTINGS["reward/http"]["options"]
    cases = SETTINGS["reward/http"]["cases"]


class TestProcess(RewardConformance):
    backend = "process"
    options: ClassVar = SETTINGS["reward/process"]["options"]
    cases = SETTINGS["reward/process"]["cases"]


class TestModel(RewardConformance):
    backend = "model"
    handles: ClassVar = SETTINGS["reward/model"]["handles"]
    cases = SETTINGS["reward/model"]["cases"]


@pytest.mark.slow
class TestFunction(RewardConformance):
    backend = "function"
    cases = (
        RewardCase("yes", 1.0, ground_truth="yes"),
        RewardCase("hang", None),
        RewardCase("raise", None),
        RewardCase("no", 0.0, ground_truth="yes"),
        RewardCase("die", None),
        RewardCase("nan", None),
        RewardCase("none", None),
        RewardCase("text", None),
    )

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _users_code(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        file = tmp_path_factory.mktemp("user") / "misbehaving.py"
        file.write_text(MISBEHAVING)
        cls.options = {"path": f"{file}:compute_score", "timeout_s": 1.0, "num_workers": 2}


class TestRunningNormalisation(SampleFilterConformance):
    backend = "running_normalisation"
    options: ClassVar = SETTINGS["sample_filter/running_normalisation"]["options"]
    bad_options = SETTINGS["sample_filter/running_normalisation"]["bad_options"]
    cases = SETTINGS["sample_filter/running_normalisation"]["cases"]
