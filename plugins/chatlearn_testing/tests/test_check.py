"""Suites run on records, as ``chatlearn plugins check`` does."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from chatlearn_core.exceptions import PluginError
from chatlearn_core.plugins.records import RECORD_TYPES, ScheduleSpec
from chatlearn_testing.check import SUITES, run_conformance, suite_class, suites_for
from chatlearn_testing.cli.check_entries import SUITE_NAMES
from chatlearn_testing.fakes import records
from chatlearn_testing.fakes.bigram import build_bigram_model
from chatlearn_testing.suites import RewardCase, TrainerConformance

PLAIN = "chatlearn_testing.fakes.bigram:load_bigram_model"
CASES = (RewardCase("all", 1.0, token_ids=(1,)), RewardCase("none", 0.0, token_ids=(2,)))


def test_every_kind_of_backend_has_a_suite() -> None:
    assert set(SUITES) == set(SUITE_NAMES) == set(RECORD_TYPES)
    assert {kind: suite.__name__ for kind, suite in SUITES.items()} == SUITE_NAMES
    assert suites_for(records.FAKE_TRAINER) is TrainerConformance


@pytest.mark.slow
def test_records_of_several_kinds_in_one_run(tmp_path: Path) -> None:
    results = run_conformance(
        [records.FAKE_TRAINER, records.FAKE_REWARD, records.FAKE_WEIGHT_SYNC],
        model_directory=build_bigram_model(tmp_path / "model"),
        load_reference=PLAIN,
        settings={"reward/fake": {"cases": CASES}},
    )
    assert results.conforms, results.output
    assert {verdict.record for verdict in results.of("passed")} == {"trainer/fake", "reward/fake", "weight_sync/fake"}
    assert all(verdict.reason for verdict in results.of("skipped"))


def test_a_failure_names_record_test_and_reason() -> None:
    wrong = (RewardCase("all", 0.25, token_ids=(1,)), *CASES)
    results = run_conformance(
        [records.FAKE_REWARD], settings={"reward/fake": {"cases": wrong}}, select=["test_one_result_a_sample_in_order"]
    )
    [failure] = results.verdicts
    assert (failure.record, failure.verdict) == ("reward/fake", "failed")
    assert "'all' got 1.0, not 0.25" in failure.reason
    assert not results.conforms


def test_a_selection_that_names_no_test_is_an_error() -> None:
    with pytest.raises(PluginError, match="test_of_that_name_is_none"):
        run_conformance([records.FAKE_WEIGHT_SYNC], select=["test_of_that_name_is_none"])


def test_what_a_suite_needs_is_asked_for() -> None:
    with pytest.raises(PluginError, match="model directory"):
        suite_class(records.FAKE_GENERATOR)
    with pytest.raises(PluginError, match=r"samples with known rewards: pass them in settings\['cases'\]"):
        suite_class(records.FAKE_REWARD)
    with pytest.raises(PluginError, match=r"steps with known values: pass them in settings\['values'\]"):
        suite_class(ScheduleSpec(name="acme", factory="a:b", options="a:c"))
    with pytest.raises(PluginError, match=r"overrides ConformanceSuite.record"):
        suite_class(records.FAKE_WEIGHT_SYNC, settings={"record": classmethod(lambda cls: None)})


def test_a_record_must_be_the_registered_one() -> None:
    # 'format' is registered by a first-party plugin with other code.
    impostor = dataclasses.replace(records.FAKE_REWARD, name="format")
    results = run_conformance(
        [impostor],
        settings={"reward/format": {"cases": CASES}},
        select=["test_record_is_the_one_that_is_registered"],
    )
    assert [verdict.verdict for verdict in results.verdicts] == ["failed"]
