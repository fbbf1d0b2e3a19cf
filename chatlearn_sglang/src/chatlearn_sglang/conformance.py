"""Settings for ``chatlearn plugins check chatlearn-sglang``; runs never import this module."""

from __future__ import annotations

import os
from typing import Any

PYTHON_VARIABLE = "CHATLEARN_SGLANG_PYTHON"
"""Environment variable with the interpreter that has SGLang, if it differs from the interpreter of the check."""

SETTINGS: dict[str, dict[str, Any]] = {
    "generator/sglang": {
        "build_model": "chatlearn_hf.tiny:build_tiny_model",
        "load_reference": "chatlearn_hf.plain_forward:load_plain_model",
        "options": {"python": os.environ.get(PYTHON_VARIABLE)},
    },
}
