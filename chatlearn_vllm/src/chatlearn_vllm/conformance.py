"""Settings for ``chatlearn plugins check chatlearn-vllm``; runs never import this module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chatlearn_hf.tiny import build_tiny_model

ENGINE_ARGUMENTS: dict[str, Any] = {"kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 64}
"""A small cache is enough for tiny models."""


def build_model(directory: Path) -> Path:
    """Build a tiny model whose attention head width suits vLLM's CPU kernels (a multiple of 32)."""
    return build_tiny_model(directory, hidden=128)


SETTINGS: dict[str, dict[str, Any]] = {
    "generator/vllm": {
        "build_model": "chatlearn_vllm.conformance:build_model",
        "load_reference": "chatlearn_hf.plain_forward:load_plain_model",
        "engine_arguments": ENGINE_ARGUMENTS,
    },
}
