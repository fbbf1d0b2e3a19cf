"""Settings of ``chatlearn plugins check chatlearn-hf``; no run imports them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from chatlearn_hf.tiny import SPECIAL_TOKENS, build_character_tokenizer, build_tiny_model
from chatlearn_testing.suites import ModelCase

VOCAB_SIZE = len(SPECIAL_TOKENS) + len(["<unk>", "\n"]) + len(range(32, 127))
"""Tokens of ``build_character_tokenizer``."""


def build_model(directory: Path, **settings: Any) -> Path:
    """Build a tiny model with one token per character."""
    return build_tiny_model(directory, tokenizer=build_character_tokenizer(), **settings)


SETTINGS: dict[str, dict[str, Any]] = {
    "model_family/transformers": {
        "cases": (
            ModelCase("qwen3", partial(build_model, family="qwen3"), VOCAB_SIZE, 512),
            ModelCase("llama", partial(build_model, family="llama", tie=False, max_length=96), VOCAB_SIZE, 96),
            ModelCase("qwen3_moe", partial(build_model, family="qwen3_moe"), VOCAB_SIZE, 512),
        ),
    },
}
