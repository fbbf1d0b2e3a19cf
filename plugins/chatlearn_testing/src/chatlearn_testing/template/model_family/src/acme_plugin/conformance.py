"""Input of the conformance suite; ``chatlearn plugins check`` and the tests read it, a run never does."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chatlearn_testing.suites import ModelCase

from acme_plugin.family import CHARACTERS_FILE, CONFIG_FILE
from acme_plugin.tokenizer import CONTROL

VOCAB_SIZE = len(CONTROL) + len(string.printable)
MAX_LENGTH = 64


def build_model(directory: Path) -> Path:
    """Write a model directory, without weights, which a family does not read."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "acme", "vocab_size": VOCAB_SIZE, "max_length": MAX_LENGTH}
    (directory / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
    (directory / CHARACTERS_FILE).write_text(json.dumps(list(string.printable)), encoding="utf-8")
    return directory


SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "model_family/acme": {
        "cases": (ModelCase("acme", build_model, VOCAB_SIZE, MAX_LENGTH),),
    },
}
