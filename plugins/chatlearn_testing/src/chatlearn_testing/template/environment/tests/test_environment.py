from __future__ import annotations

import asyncio

import pytest
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.protocols import RoleContext, RolloutContext, RolloutOrder
from chatlearn_core.types import Prompt, Rollout, SamplingParams
from chatlearn_testing.fakes.tokenizer import CharacterTokenizer
from chatlearn_testing.suites import EnvironmentConformance
from chatlearn_testing.suites.environment import ScriptedPolicy

from acme_plugin.conformance import SETTINGS
from acme_plugin.environment import AcmeEnvironment
from acme_plugin.options import AcmeOptions


class TestConformance(EnvironmentConformance):
    backend = "acme"
    options = SETTINGS["environment/acme"]["options"]
    cases = SETTINGS["environment/acme"]["cases"]


def make(*replies: str, ground_truth: object = 7) -> Rollout:
    tokenizer = CharacterTokenizer()
    ids = tokenizer.encode("Guess.", add_special_tokens=False)
    prompt = Prompt("p", ids, "Guess.", ground_truth=ground_truth)
    order = RolloutOrder("p@0#0", "p@0", prompt, SamplingParams(16), 0, 200, 60.0)
    options = AcmeOptions()
    environment = AcmeEnvironment(options, RoleContext("environment"))
    policy = ScriptedPolicy(tokenizer, replies)
    return asyncio.run(environment.rollout(prompt, RolloutContext(order, tokenizer, policy)))


def test_it_says_higher_and_lower() -> None:
    rollout = make("3", "9", "7")
    [sample] = rollout.samples
    text = "".join(map(chr, sample.token_ids[~sample.loss_mask]))
    assert text == "Guess. Higher.  Lower. "
    assert rollout.reward is not None
    assert rollout.reward.components == {"accuracy": 1.0, "guesses": 3.0}


def test_a_ground_truth_that_is_no_number_is_an_error() -> None:
    with pytest.raises(ConfigError, match="'seven' is not a whole number"):
        make("7", ground_truth="seven")
