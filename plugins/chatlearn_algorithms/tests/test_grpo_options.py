from __future__ import annotations

import pytest
from pydantic import ValidationError

from chatlearn_algorithms.grpo_options import DrGRPOOptions, GRPOOptions


def test_dr_grpo_differs_in_two_defaults():
    assert issubclass(DrGRPOOptions, GRPOOptions)
    ours, theirs = DrGRPOOptions().model_dump(), GRPOOptions().model_dump()
    assert {name: ours[name] for name in ours if ours[name] != theirs[name]} == {
        "advantage_std": "none",
        "aggregation": "seq_mean_token_sum_norm",
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 1}, "greater than or equal to 2"),
        ({"epsilon": 0.0}, "greater than 0"),
        ({"dual_clip": 1.0}, "greater than 1"),
        ({"clip_low": 1.0}, "less than 1"),
        ({"clip_hi": 0.3}, "Extra inputs are not permitted"),
        ({"constant_length": 100}, "constant_length=100 has no meaning for aggregation=seq_mean_token_mean"),
        (
            {"importance_correction": "mask", "recompute_old_logprobs": False},
            "importance_correction=mask weighs by .* set recompute_old_logprobs: true",
        ),
        ({"importance_correction": "mask", "importance_threshold": 0.8}, r"0\.8 is below the lower bound 1\.25"),
        ({"importance_correction": "mask_sequences"}, "set importance_level: sequence_geometric"),
        (
            {"importance_min": 0.5},
            r"importance_min=0\.5 bounds importance weights, but importance_correction=none uses none",
        ),
        (
            {"kl_weight": "ratio", "kl_estimator": "k3_straight_through"},
            "kl_weight=ratio and .* each give the KL its whole gradient.* set kl_weight: none",
        ),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        GRPOOptions(**settings)


def test_an_environment_says_itself_which_generators_it_uses():
    kinds = dict(GRPOOptions(roles={"environment": "desk", "reward": None}).required_roles)
    assert kinds == {"desk": "environment", "trainer": "trainer"}
    assert dict(GRPOOptions().required_roles) == {"generator": "generator", "trainer": "trainer", "reward": "reward"}


def test_k1_alone_in_a_loss_is_warned_of():
    (warning,) = GRPOOptions(kl_coef=0.1, kl_estimator="k1").warnings
    assert warning[0] == "kl_estimator"
    assert "expectation of its gradient is 0" in warning[1]
    for fine in ({}, {"kl_estimator": "k1"}, {"kl_coef": 0.1}):
        assert GRPOOptions(**fine).warnings == ()
    assert GRPOOptions(kl_coef=0.1, kl_estimator="k1", kl_weight="ratio").warnings == ()
