from __future__ import annotations

import re
from pathlib import Path

import yaml

from chatlearn_algorithms.grpo_options import GRPOOptions
from chatlearn_algorithms.plugin import chatlearn_algorithms

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_example_is_valid():
    (example,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    GRPOOptions(**yaml.safe_load(example)["algorithm"]["options"])


def test_every_algorithm_and_option_is_described():
    names = [spec.name for spec in chatlearn_algorithms()] + list(GRPOOptions.model_fields)
    assert [name for name in names if f"`{name}`" not in README] == []
