"""What authors may import is importable in one place, described in the README, and light where it must be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

import chatlearn_generator_kit
from chatlearn_core.types import TensorSpec


def test_every_public_name_can_be_imported_and_is_described() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    for name in chatlearn_generator_kit.__all__:
        assert getattr(chatlearn_generator_kit, name).__name__ == name
        assert f"`{name}`" in readme, name
    assert sorted(chatlearn_generator_kit.__all__) == sorted(chatlearn_generator_kit._MODULES)


def test_engine_arguments_are_checked_without_torch() -> None:
    code = "import sys; from chatlearn_generator_kit import owned_problems; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_manifest_lists_names_shapes_dtypes_and_aliases() -> None:
    manifest = chatlearn_generator_kit.manifest_of(
        {"embed": torch.zeros(8, 4, dtype=torch.bfloat16)}, {"head": "embed"}
    )
    assert manifest.tensors == {"embed": TensorSpec("embed", (8, 4), "bfloat16")}
    assert manifest.aliases == {"head": "embed"}
