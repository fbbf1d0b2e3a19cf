from __future__ import annotations

import pytest
from pydantic import ValidationError

from chatlearn_algorithms.grpo_options import CISPOOptions, DAPOOptions, GDPOOptions, GRPOOptions, GSPOOptions
from chatlearn_algorithms.ppo_options import DecoupledPPOOptions, PPOOptions
from chatlearn_algorithms.reinforce_options import MaxRLOptions, ReinforcePPOptions, RLOOOptions


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (GRPOOptions, {"kl_coef": -0.1}, "greater than or equal to 0"),
        (
            GRPOOptions,
            {"kl_placement": "reward", "kl_weight": "ratio"},
            "a KL in the reward .* has no gradient",
        ),
        (
            GRPOOptions,
            {"kl_placement": "reward", "kl_estimator": "k3_straight_through"},
            "differs in its gradient alone.* set kl_estimator: k1, k2, k3 or full",
        ),
        (GRPOOptions, {"kl_estimator": "full", "kl_weight": "score"}, "kl_estimator=full needs no correction"),
        (GRPOOptions, {"kl_target": 0.1}, "kl_target=0.1 adapts kl_coef by factors"),
        (GRPOOptions, {"kl_top_k": 0}, "greater than or equal to 1"),
        (DAPOOptions, {"drop_zero_spread_groups": False}, "dynamic_sampling=true replaces groups"),
        (DAPOOptions, {"dynamic_sampling": False, "oversampling": 2.0}, "oversampling=2 says how many prompts"),
        (DAPOOptions, {"overlong_length": 9}, "overlong_length=9 belongs to a penalty that is off"),
        (GSPOOptions, {"overlong_penalty": 0.5}, "overlong_penalty=0.5 belongs to a penalty that is off"),
        (RLOOOptions, {"dynamic_sampling": True}, "set drop_zero_spread_groups: true"),
        (DAPOOptions, {"overlong_length": 9, "overlong_buffer": 10}, "overlong_buffer=10 is longer than"),
        (GDPOOptions, {}, "at least 1 item"),
        (GDPOOptions, {"rewards": {"a": 1.0}, "kl_placement": "reward"}, "normalises each reward separately"),
        (GDPOOptions, {"rewards": {"a": 1.0}, "overlong_buffer": 4}, "name a reward of the length in rewards"),
        (MaxRLOptions, {"overlong_buffer": 4}, "a penalty on length .*can make 0 or negative"),
        (ReinforcePPOptions, {"dynamic_sampling": True}, "Extra inputs are not permitted"),
        (MaxRLOptions, {"kl_placement": "reward"}, "maxrl divides by the mean reward"),
        (CISPOOptions, {"dual_clip": 3.0}, "Extra inputs are not permitted"),
        (CISPOOptions, {"clip_low": 1.5}, "less than or equal to 1"),
        (ReinforcePPOptions, {"gamma": 1.1}, "less than or equal to 1"),
        (ReinforcePPOptions, {"advantage_std": "none"}, "Extra inputs are not permitted"),
        (PPOOptions, {"gae_lambda": -0.1}, "greater than or equal to 0"),
        (PPOOptions, {"value_clip": 0.0}, "greater than 0"),
        (PPOOptions, {"critic_epochs": 0}, "greater than or equal to 1"),
        (PPOOptions, {"roles": {"critic": "trainer"}}, "roles.critic=trainer is also the policy or the reference"),
        (PPOOptions, {"roles": {"reward": None}}, "needs an environment"),
        (DecoupledPPOOptions, {"importance_correction": "none"}, "or algorithm.name: ppo"),
    ],
)
def test_wrong_settings_are_refused(model, settings, message):
    with pytest.raises(ValidationError, match=message):
        model(**settings)


def test_defaults_are_those_of_the_papers():
    assert (DAPOOptions().clip_low, DAPOOptions().clip_high, DAPOOptions().aggregation) == (0.2, 0.28, "token_mean")
    assert GSPOOptions().aggregation == GRPOOptions().aggregation == "seq_mean_token_mean"
    assert (GSPOOptions().clip_low, GSPOOptions().clip_high) == (3e-4, 4e-4)
    assert CISPOOptions().clip_low == 1.0, "no lower bound"
    assert (RLOOOptions().kl_placement, RLOOOptions().aggregation) == ("reward", "seq_mean_token_sum")
    assert (ReinforcePPOptions().group_size, PPOOptions().group_size) == (1, 1)
    assert DecoupledPPOOptions().stale_tokens is None
    assert PPOOptions().stale_tokens is not None


def test_ppo_needs_a_critic():
    assert dict(PPOOptions(roles={"critic": "judge"}).required_roles) == {
        "generator": "generator",
        "reward": "reward",
        "trainer": "trainer",
        "judge": "trainer",
    }


def test_k1_in_the_reward_is_nothing_to_warn_of():
    assert RLOOOptions(kl_coef=0.1).warnings == ()
    assert len(RLOOOptions(kl_coef=0.1, kl_placement="loss").warnings) == 1
