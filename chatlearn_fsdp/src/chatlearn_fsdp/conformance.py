"""Settings for ``chatlearn plugins check chatlearn-fsdp``; runs never import this module."""

from __future__ import annotations

from typing import Any

RANK_LAYOUTS: tuple[dict[str, Any], ...] = ({}, {"tensor_parallel": 2}, {"ulysses": 2}, {"ring": 2})

SETTINGS: dict[str, dict[str, Any]] = {
    "trainer/fsdp": {
        "build_model": "chatlearn_hf.tiny:build_tiny_model",
        "load_reference": "chatlearn_hf.plain_forward:load_plain_model",
        "rank_layouts": RANK_LAYOUTS,
    },
}
