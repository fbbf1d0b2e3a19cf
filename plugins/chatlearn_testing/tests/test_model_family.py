"""The suite for model families on the fake one, and its tests of layouts on faulty round trips."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from chatlearn_testing.check import Results, run_conformance
from chatlearn_testing.fakes.bigram import MAX_LENGTH
from chatlearn_testing.fakes.records import BIGRAM_FAMILY
from chatlearn_testing.suites import ModelCase, ModelFamilyConformance

CASES = (ModelCase("bigram", "chatlearn_testing.fakes.bigram:build_bigram_model", 32, MAX_LENGTH),)
WHOLE = "test_layouts_hold_the_whole_checkpoint"
HEADS = "test_layouts_name_the_other_heads"
INCOMPLETE = "test_layouts_refuse_an_incomplete_checkpoint"
IMPORTED = "test_layouts_can_be_imported"
TESTED = "test_every_layout_can_be_tested"


class TestBigramFamily(ModelFamilyConformance):
    backend = BIGRAM_FAMILY
    has_tokenizer_files = False
    cases = CASES


@pytest.fixture(autouse=True)
def _faults_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def check_layout(round_trip: str, *select: str, layout: str = "LAYOUT", trainer: str = "fsdp") -> Results:
    """Run tests of layouts on a round trip of ``layout_faults``, for a trainer that has all heads."""
    record = replace(BIGRAM_FAMILY, layouts={trainer: f"layout_faults:{layout}"})
    own = {
        "cases": CASES,
        "has_tokenizer_files": False,
        "round_trips": {"fsdp": f"layout_faults:{round_trip}"},
    }
    return run_conformance([record], settings={"model_family/bigram": own}, select=select)


def test_a_right_layout_passes() -> None:
    results = check_layout("right", WHOLE, HEADS, INCOMPLETE, IMPORTED, TESTED)
    assert [verdict.verdict for verdict in results.verdicts] == ["passed"] * 5, results.output


@pytest.mark.slow  # each in a process that imports torch
@pytest.mark.parametrize(
    ("fault", "test", "reason"),
    [
        ("loses_a_tensor", WHOLE, "unigram.bias of the checkpoint do not come back"),
        ("adds_a_tensor", WHOLE, "rotary.inv_freq are not in the checkpoint"),
        ("renames_a_tensor", WHOLE, "unigram.bias of the checkpoint do not come back"),
        ("transposes", WHOLE, "transition.weight comes back with .* bytes changed"),
        ("narrows", WHOLE, "transition.weight comes back with .* bytes changed"),
        ("another_type", WHOLE, "is torch.float64, not torch.float32"),
        ("flattens", WHOLE, r"has shape \[1024\], not \[32, 32\]"),
        ("changes_the_last_bits", WHOLE, "comes back with . of 4096 bytes changed"),
        ("wide_head", HEADS, "score.weight of the head has 2 rows, not 1"),
        ("no_head", HEADS, r"the head's tensors are \[\]"),
        ("head_spoils_the_trunk", HEADS, "transition.weight comes back with .* bytes changed"),
        ("refuses_every_head", HEADS, "no head at all"),
        ("takes_what_is_missing", INCOMPLETE, "a checkpoint in which transition.weight lacks loads"),
        ("raises_anything", INCOMPLETE, "lacks raises KeyError"),
        ("ends_the_process", WHOLE, r"without an answer \(exit code 3\)"),
    ],
)
def test_a_faulty_round_trip_is_noticed(fault: str, test: str, reason: str) -> None:
    [failure] = check_layout(fault, test).of("failed")
    assert failure.test == test
    assert re.search(reason, failure.reason), failure.reason


@pytest.mark.slow
def test_a_layout_that_names_nothing_is_noticed() -> None:
    [failure] = check_layout("right", IMPORTED, layout="MISSING").of("failed")
    assert "has no attribute 'MISSING'" in failure.reason
    [failure] = check_layout("right", IMPORTED, layout="NOTHING").of("failed")
    assert "is None" in failure.reason


def test_a_layout_without_a_round_trip_is_noticed() -> None:
    [failure] = check_layout("right", TESTED, trainer="acme").of("failed")
    assert "the record has layouts for ['acme'], round_trips are for ['fsdp']" in failure.reason
