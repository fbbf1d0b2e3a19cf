from __future__ import annotations

import re
from pathlib import Path

import yaml

from chatlearn_core.config.models import RoleConfig
from chatlearn_transformers.engine_arguments import check_engine_arguments
from chatlearn_transformers.options import TransformersGeneratorOptions

README = Path(__file__).parents[1] / "README.md"


def test_the_example_is_valid_and_names_every_option():
    text = README.read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    role = RoleConfig(**yaml.safe_load(block)["roles"]["generator"])
    TransformersGeneratorOptions(**role.options)
    check_engine_arguments("generator", role.engine)
    assert set(role.options) == set(TransformersGeneratorOptions.model_fields)
