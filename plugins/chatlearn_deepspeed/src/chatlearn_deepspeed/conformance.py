"""Settings for ``chatlearn plugins check chatlearn-deepspeed``; runs never import this module."""

from __future__ import annotations

from typing import Any

ENGINE_STATE = frozenset(f"the environment: {name}" for name in ("DS_ACCELERATOR", "LOCAL_RANK"))

RANK_LAYOUTS: tuple[dict[str, Any], ...] = (
    {"zero_stage": 1},
    {"zero_stage": 3},
    {"zero_stage": 1, "ulysses": 2},
    {"zero_stage": 1, "ring": 2},
)

SETTINGS: dict[str, dict[str, Any]] = {
    "trainer/deepspeed": {
        "build_model": "chatlearn_hf.tiny:build_tiny_model",
        "load_reference": "chatlearn_hf.plain_forward:load_plain_model",
        "rank_layouts": RANK_LAYOUTS,
        "engine_state": ENGINE_STATE,
    },
}
