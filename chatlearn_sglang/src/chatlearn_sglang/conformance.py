"""What ``chatlearn plugins check chatlearn-sglang`` needs to know; never imported by a run."""

from __future__ import annotations

import os
from typing import Any

PYTHON_VARIABLE = "CHATLEARN_SGLANG_PYTHON"
"""Names the interpreter that holds SGLang, where it is not the one that checks."""

SETTINGS: dict[str, dict[str, Any]] = {
    "generator/sglang": {
        "build_model": "chatlearn_hf.tiny:build_tiny_model",
        "load_reference": "chatlearn_hf.plain_forward:load_plain_model",
        "options": {"python": os.environ.get(PYTHON_VARIABLE)},
    },
}
