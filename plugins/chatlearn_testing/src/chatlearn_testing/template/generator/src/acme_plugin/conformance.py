"""Input of the conformance suite; ``chatlearn plugins check`` and the tests read it, a run never does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "generator/acme": {
        "build_model": "chatlearn_testing.fakes.bigram:build_bigram_model",
        "load_reference": "chatlearn_testing.fakes.bigram:load_bigram_model",
    }
}
