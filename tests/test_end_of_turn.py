"""The tokens with which a model has learned to end its turns also end its completions."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from chatlearn_core.config.load import load_config
from chatlearn_core.executor.assembly import assemble
from chatlearn_core.plugins.loader import discover_plugins


@pytest.mark.parametrize(
    ("eos", "settings", "stops"),
    [
        ("<|im_end|>", {}, []),  # ends a completion anyway
        ("<|endoftext|>", {}, ["<|im_end|>"]),
        ("<|endoftext|>", {"apply_chat_template": False}, []),
    ],
)
def test_completions_stop_at_the_templates_end_of_turn(
    eos: str, settings: dict[str, Any], stops: list[str], recipe: Any, tiny_model: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = eos
    tokenizer.save_pretrained(model)
    recipe.content["model"]["path"] = str(model)
    recipe.content["data"] |= {**settings, "eval": recipe.content["data"]["train"]}
    for role, backend in (("trainer", "fsdp"), ("generator", "transformers")):
        recipe.content["roles"][role]["backend"] = backend
    recipe.content["roles"]["reward"] = {"kind": "reward", "backend": "format", "options": {"pattern": ".*"}}
    recipe.write()
    registry = discover_plugins()
    assembly = assemble(load_config(recipe.file, (), registry), registry)
    expected = tuple(tokenizer.convert_tokens_to_ids(stops))
    assert assembly.sampling.stop_token_ids == expected
    assert assembly.evaluations[0].sampling.stop_token_ids == expected
