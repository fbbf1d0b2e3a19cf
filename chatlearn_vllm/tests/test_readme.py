from __future__ import annotations

import re
from pathlib import Path

import yaml

from chatlearn_core.config.models import RoleConfig
from chatlearn_core.protocols.lifecycle import ModelSource, RoleContext
from chatlearn_vllm.engine_arguments import engine_arguments
from chatlearn_vllm.options import VLLMGeneratorOptions

README = Path(__file__).parents[1] / "README.md"


def test_the_example_is_valid_and_names_every_option():
    text = README.read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    role = RoleConfig(**yaml.safe_load(block)["roles"]["generator"])
    options = VLLMGeneratorOptions(**role.options)
    engine_arguments(options, RoleContext("generator", ModelSource("m", "m"), engine_arguments=role.engine))
    assert set(role.options) == set(VLLMGeneratorOptions.model_fields)
