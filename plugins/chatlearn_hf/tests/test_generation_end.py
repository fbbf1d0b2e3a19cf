"""A model that has learned a chat template stops where its turns end, wherever it is served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chatlearn_hf.generation_end import stop_at_end_of_turn
from chatlearn_hf.tiny import build_tiny_tokenizer

END = build_tiny_tokenizer(300).convert_tokens_to_ids("<|im_end|>")


@pytest.mark.parametrize(
    ("named", "expected"),
    [(0, [0, END]), ([0, 5], [0, 5, END]), (None, END), (END, END), ([0, END], [0, END])],
)
def test_the_end_of_a_turn_is_among_the_ends(named: Any, expected: Any, tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    settings = {"temperature": 0.6} | ({} if named is None else {"eos_token_id": named})
    file.write_text(json.dumps(settings))
    stop_at_end_of_turn(tmp_path, build_tiny_tokenizer(300))
    assert json.loads(file.read_text()) == {"temperature": 0.6, "eos_token_id": expected}


def test_models_without_template_or_generation_config_are_unchanged(tmp_path: Path) -> None:
    tokenizer = build_tiny_tokenizer(300)
    stop_at_end_of_turn(tmp_path, tokenizer)
    assert not list(tmp_path.iterdir())
    file = tmp_path / "generation_config.json"
    file.write_text('{"eos_token_id": 0}')
    tokenizer.chat_template = None
    stop_at_end_of_turn(tmp_path, tokenizer)
    assert file.read_text() == '{"eos_token_id": 0}'
