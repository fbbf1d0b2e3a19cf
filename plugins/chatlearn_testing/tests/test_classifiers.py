"""The suite's tests of generators that serve classifiers, on one that is right and on faulty ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chatlearn_testing.check import Results, run_conformance
from chatlearn_testing.fakes.bigram import build_bigram_model
from chatlearn_testing.fakes.records import FAKE_GENERATOR
from chatlearn_testing.suites import ClassifierCase

SCORES = "test_scores_are_those_of_the_classifier"
ALONE = "test_a_classifier_takes_requests_to_classify_alone"
REFUSED = "test_a_model_that_samples_refuses_to_classify"
CASE = ClassifierCase(
    build_model="chatlearn_testing.fakes.bigram:build_bigram_model",
    load_reference="classifying:BigramScore",
    options={"classifies": True},
)


@pytest.fixture(autouse=True)
def _faults_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def check(folder: Path, factory: str = "Classifying", case: ClassifierCase | None = CASE, **fields: Any) -> Results:
    record = replace(
        FAKE_GENERATOR,
        factory=f"classifying:{factory}",
        options="classifying:ClassifyingOptions",
        **{"classifies": True} | fields,
    )
    return run_conformance(
        [record],
        model_directory=build_bigram_model(folder / "model"),
        load_reference="chatlearn_testing.fakes.bigram:load_bigram_model",
        settings={"generator/fake": {"classifier": case}},
        select=[SCORES, ALONE, REFUSED],
    )


def test_a_right_classifier_passes(tmp_path: Path) -> None:
    results = check(tmp_path)
    assert [verdict.verdict for verdict in results.verdicts] == ["passed"] * 3, results.output


@pytest.mark.parametrize(
    ("fault", "test", "reason"),
    [
        ("Sigmoid", SCORES, "a plain forward gives"),
        ("OfThePromptBefore", SCORES, "a plain forward gives"),
        ("OnlyFirstTokens", SCORES, "prompt-4: the score is"),
        ("WithToken", SCORES, "1 tokens were sampled"),
        ("WithReasonLength", SCORES, "finish reason is 'length'"),
        ("WithoutScore", SCORES, "has no score"),
        ("AlwaysClassifies", ALONE, "DID NOT RAISE"),
        ("TakesLongPrompts", ALONE, "DID NOT RAISE"),
        ("SamplesWhenAskedToClassify", REFUSED, "DID NOT RAISE"),
    ],
)
def test_a_fault_fails(fault: str, test: str, reason: str, tmp_path: Path) -> None:
    failed = {verdict.test: verdict.reason for verdict in check(tmp_path, fault).of("failed")}
    assert reason in failed.get(test, ""), failed


def test_a_declared_classifier_needs_a_case(tmp_path: Path) -> None:
    failed = check(tmp_path, case=None).of("failed")
    assert [verdict.test for verdict in failed] == [SCORES, ALONE]
    assert "set classifier, a ClassifierCase" in failed[0].reason


def test_the_rest_is_skipped_where_nothing_is_declared(tmp_path: Path) -> None:
    results = check(tmp_path, case=None, classifies=False)
    assert [verdict.verdict for verdict in results.verdicts] == ["skipped", "skipped", "passed"]
