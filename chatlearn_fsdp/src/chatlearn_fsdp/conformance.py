"""What ``chatlearn plugins check chatlearn-fsdp`` needs to know; never imported by a run."""

from __future__ import annotations

from typing import Any

SETTINGS: dict[str, dict[str, Any]] = {
    "trainer/fsdp": {
        "build_model": "chatlearn_hf.tiny:build_tiny_model",
        "load_reference": "chatlearn_hf.plain_forward:load_plain_model",
    },
}
