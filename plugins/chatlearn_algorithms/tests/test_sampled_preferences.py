"""Online DPO and rejection sampling: which samples are learned from."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from chatlearn_algorithms.dpo import DPOLoss
from chatlearn_algorithms.ipo import IPOLoss
from chatlearn_algorithms.online_dpo import EQUAL_REWARDS, OnlineDPO
from chatlearn_algorithms.pair_loss import NOT_COMPARED
from chatlearn_algorithms.preference_options import OnlineDPOOptions, RejectionSamplingOptions
from chatlearn_algorithms.rejection_sampling import BEST_TOO_BAD, NOT_THE_BEST, RejectionSampling
from chatlearn_core.types import LogprobBasis, scored_batch


@pytest.fixture
def scored(make_group):
    samples = [*make_group("a", [0.2, 0.9, 0.5, 0.9]), *make_group("b", [0.3] * 4), *make_group("c", [1.0, None, 0.0])]
    return scored_batch([sample for sample in samples if sample.exclusion is None])


def test_best_against_worst(scored, make_context):
    algorithm = OnlineDPO(OnlineDPOOptions(group_size=4), make_context(reference="trainer"))
    derived = algorithm.advantages(scored, 1)
    assert derived.exclusions == {
        "a@0#2": NOT_COMPARED,
        "a@0#3": NOT_COMPARED,
        **{f"b@0#{i}": EQUAL_REWARDS for i in range(4)},
    }
    assert derived.sequence_data["rank"].tolist() == scored.sequence_data["reward"].tolist()
    assert derived.metrics["reward"].value == pytest.approx((2.5 + 1.2 + 1.0) / 10)


def test_all_pairs_keep_everything_but_equal_groups(scored, make_context):
    algorithm = OnlineDPO(OnlineDPOOptions(pairing="all"), make_context(reference="trainer"))
    assert set(algorithm.advantages(scored, 1).exclusions) == {f"b@0#{i}" for i in range(4)}


def test_the_loss_is_that_of_the_offline_algorithm_at_the_samples_temperature(make_context):
    context = make_context(LogprobBasis(temperature=0.7), reference="trainer")
    assert OnlineDPO(OnlineDPOOptions(beta=0.3), context).loss() == DPOLoss(0.7, beta=0.3)
    assert OnlineDPO(OnlineDPOOptions(beta=0.3, loss="ipo"), context).loss() == IPOLoss(0.7, beta=0.3)


def test_rejection_sampling_keeps_the_best(scored, make_context):
    options = RejectionSamplingOptions(group_size=4, keep=2, min_reward=0.5)
    derived = RejectionSampling(options, make_context()).advantages(scored, 1)
    kept = [sample for sample in scored.sample_ids if sample not in derived.exclusions]
    assert kept == ["a@0#1", "a@0#3", "c@0#0"]
    assert derived.exclusions["b@0#0"] == BEST_TOO_BAD
    assert derived.exclusions["b@0#2"] == derived.exclusions["a@0#0"] == NOT_THE_BEST
    assert derived.metrics["rejection_sampling/kept_reward"].value == pytest.approx(2.8 / 3)


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        (OnlineDPOOptions, {"group_size": 1}, "greater than or equal to 2"),
        (OnlineDPOOptions, {"loss": "ipo", "label_smoothing": 0.1}, "has no meaning for loss=ipo"),
        (OnlineDPOOptions, {"roles": {"reward": None}}, "needs an environment that gives rewards"),
        (RejectionSamplingOptions, {"group_size": 2, "keep": 2}, "keep=2 keeps all completions of group_size=2"),
        (RejectionSamplingOptions, {"roles": {"reward": None}}, "needs an environment that gives rewards"),
    ],
)
def test_options_that_contradict_each_other(options, settings, message):
    with pytest.raises(ValidationError, match=message):
        options(**settings)
