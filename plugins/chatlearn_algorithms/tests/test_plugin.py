from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from typing import get_args

import pytest
from pydantic import BaseModel

from chatlearn_algorithms import grpo_options, plugin
from chatlearn_core.losses import AggregationMode, CorrectionLevel, KLClamp, KLEstimator, KLWeight

SPECS = {spec.name: spec for spec in plugin.chatlearn_algorithms()}


def test_registers_the_three():
    assert set(SPECS) == {"grpo", "dr_grpo", "sft"}
    assert dict(SPECS["grpo"].roles) == {"generator": "generator", "reward": "reward", "trainer": "trainer"}
    assert dict(SPECS["sft"].roles) == {"trainer": "trainer"}


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "sft"])
def test_import_strings_lead_to_a_working_algorithm(name, make_context):
    def load(target: str) -> type:
        module, attribute = target.split(":")
        return getattr(import_module(module), attribute)

    options = load(SPECS[name].options)
    assert issubclass(options, BaseModel)
    algorithm = load(SPECS[name].factory)(options(), make_context())
    assert set(algorithm.losses()) == {"trainer"}


@pytest.mark.parametrize("module", ["plugin", "grpo_options", "sft_options"])
def test_listing_imports_nothing_heavy(module):
    code = f"import sys, chatlearn_algorithms.{module}; print(sorted({{'torch', 'numpy'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("option", "primitive"),
    [
        (grpo_options.Aggregation, AggregationMode),
        (grpo_options.KLName, KLEstimator),
        (grpo_options.KLWeightName, KLWeight),
        (grpo_options.KLClampName, KLClamp),
        (grpo_options.Level, CorrectionLevel),
    ],
)
def test_option_names_are_those_of_the_primitives(option, primitive):
    assert get_args(option) == get_args(primitive)
