"""Settings for ``chatlearn plugins check chatlearn-megatron``; runs never import this module."""

from __future__ import annotations

from typing import Any

SETTINGS: dict[str, dict[str, Any]] = {
    "trainer/megatron": {
        "build_model": "chatlearn_hf.tiny:build_tiny_model",
        "load_reference": "chatlearn_hf.plain_forward:load_plain_model",
    },
}
