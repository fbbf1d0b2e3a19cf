from __future__ import annotations

import pickle
import subprocess
import sys
from importlib import import_module
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import torch
from pydantic import BaseModel

from chatlearn_algorithms import plugin, policy_gradient_options
from chatlearn_algorithms.grpo_options import GRPOOptions
from chatlearn_algorithms.policy_loss import PolicyLoss
from chatlearn_algorithms.sft import SFTLoss
from chatlearn_algorithms.sft_options import SFTOptions
from chatlearn_algorithms.value_loss import ValueLoss
from chatlearn_core.exceptions import ConfigError, ContractError, PluginNotFoundError
from chatlearn_core.protocols import Aggregation
from chatlearn_core.protocols.data_store import fields_read_by
from chatlearn_core.types import TrainBatch, cumulative_lengths
from chatlearn_losses import (
    AggregationMode,
    CorrectionLevel,
    KLClamp,
    KLEstimator,
    KLWeight,
    aggregation_weights,
)

SPECS = {spec.name: spec for spec in plugin.chatlearn_algorithms()}


POLICY_GRADIENTS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "gdpo", "rloo", "reinforce_pp", "reinforce_pp_baseline",
    "maxrl", "ppo", "decoupled_ppo")  # fmt: skip
NEEDED: dict[str, dict[str, Any]] = {"gdpo": {"rewards": {"correct": 1.0}}}


def test_registers_the_policy_gradients_and_sft():
    assert {*POLICY_GRADIENTS, "sft"} <= set(SPECS)
    assert dict(GRPOOptions().required_roles) == {"generator": "generator", "reward": "reward", "trainer": "trainer"}
    assert dict(SFTOptions().required_roles) == {"trainer": "trainer"}


@pytest.mark.parametrize("name", SPECS)
def test_import_strings_lead_to_a_working_algorithm(name, make_context):
    def load(target: str) -> type:
        module, attribute = target.split(":")
        return getattr(import_module(module), attribute)

    options = load(SPECS[name].options)
    assert issubclass(options, BaseModel)
    algorithm = load(SPECS[name].factory)(options(**NEEDED.get(name, {})), make_context())
    assert [update.role for update in algorithm.updates(1)][-1] == "trainer"
    assert pickle.loads(pickle.dumps(algorithm.updates(1)[-1].loss)) == algorithm.updates(1)[-1].loss


@pytest.mark.parametrize(
    "module",
    [
        "plugin",
        "grpo_options",
        "policy_gradient_options",
        "reinforce_options",
        "ppo_options",
        "sft_options",
        "aggregation_options",
        "preference_options",
        "distillation_options",
    ],
)
def test_listing_imports_nothing_heavy(module):
    code = f"import sys, chatlearn_algorithms.{module}; print(sorted({{'torch', 'numpy'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("option", "primitive"),
    [
        (policy_gradient_options.KLName, KLEstimator | Literal["full"]),
        (policy_gradient_options.KLWeightName, KLWeight),
        (policy_gradient_options.KLClampName, KLClamp),
        (policy_gradient_options.Level, CorrectionLevel),
    ],
)
def test_option_names_are_those_of_the_primitives(option, primitive):
    parts = get_args(primitive) if get_origin(primitive) is Union else (primitive,)
    assert get_args(option) == tuple(name for part in parts for name in get_args(part))


def test_every_mode_of_the_primitives_is_registered_and_gives_its_weights(make_context):
    batch = TrainBatch(
        ("a", "b"),
        torch.arange(5),
        cumulative_lengths([2, 3]),
        torch.tensor([False, True, False, True, True]),
        torch.arange(2),
        torch.zeros(2, dtype=torch.int64),
    )
    specs = {spec.name: spec for spec in plugin.chatlearn_aggregations()}
    assert list(specs) == list(get_args(AggregationMode))
    for name, spec in specs.items():
        options = {"constant_length": 7} if name == "seq_mean_token_sum_norm" else {}
        selected = make_context().aggregation(name, options)
        torch.testing.assert_close(selected(batch), aggregation_weights(batch, name, **options))
        assert selected.loss_unit == spec.loss_unit == ("group" if name == "prompt_mean" else "sequence")
        assert pickle.loads(pickle.dumps(selected)).name == name
    with pytest.raises(ConfigError, match=r"aggregation_options.length: .*, for aggregation 'token_mean'; it takes no"):
        make_context().aggregation("token_mean", {"length": 7})
    with pytest.raises(PluginNotFoundError, match=r"No aggregation named 'token_meen'(.|\n)*Did you mean 'token_mean'"):
        make_context().aggregation("token_meen", {})


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ([0.0], "returned list; it must return floating-point weights, one for each of the 3 tokens"),
        (torch.zeros(2), r"returned \[2\] torch.float32"),
        (torch.ones(3), "not 0 where loss_mask is False"),
        (torch.tensor([0.0, float("nan"), 0.0]), "not finite"),
    ],
)
def test_weights_of_a_plugin_are_checked(returned, says):
    mask = torch.tensor([False, True, True])
    batch = TrainBatch(
        ("a",), torch.arange(3), cumulative_lengths([3]), mask, torch.arange(1), torch.zeros(1, dtype=torch.int64)
    )
    with pytest.raises(ContractError, match=f"aggregation 'acme' .*{says}"):
        Aggregation("acme", lambda batch, options: returned, None)(batch)


def test_losses_read_in_the_driver_what_their_aggregation_reads() -> None:
    reading = Aggregation("acme", lambda batch, options: torch.zeros(3), None, "sequence", frozenset({"advantages"}))
    for loss in (PolicyLoss(aggregation=reading), SFTLoss(aggregation=reading), ValueLoss(aggregation=reading)):
        assert fields_read_by(loss) == {"advantages"}
    assert fields_read_by(PolicyLoss(aggregation="token_mean")) == frozenset()
