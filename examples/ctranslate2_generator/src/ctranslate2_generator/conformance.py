"""Settings of ``chatlearn plugins check ctranslate2-generator``; a run never imports this module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "generator/ctranslate2": {
        "build_model": "chatlearn_hf.tiny:build_tiny_model",
        "load_reference": "chatlearn_hf.plain_forward:load_plain_model",
    }
}
