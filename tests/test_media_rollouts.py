"""Prompts with media, which the generator expands, and data of prompt and completion tokens: what reaches the trainer.

The generator is ``chatlearn_testing.fakes.media_generator``; the trainer writes down every batch that it is given, and
each number in it is compared with one that is computed here from the rows of the data.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatlearn_testing.fake_environment import FakeEnvironment
from chatlearn_testing.fakes.bigram import bigram_logits, build_bigram_model, read_bigram_tensors
from chatlearn_testing.recorded_batches import Recorded, recorded_batches

pytestmark = pytest.mark.engine

ROWS = [
    {"id": f"m{i}", "prompt": prompt, "media": media}
    for i, (prompt, media) in enumerate(
        [
            ("look at z now", ["00ff10"]),
            ("zz", ["0102", "0a0b0c0d0e"]),
            ("no picture here", []),
            ("at the end z", ["fffefdfc"]),
            ("z first", [""]),
            ("twice z the same z", ["0707", "0707"]),
        ]
    )
]
GROUP_SIZE = 2


@pytest.fixture(scope="session")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a distribution that registers the fakes."""
    environment = FakeEnvironment(tmp_path_factory.mktemp("fakes"))
    environment.install("media-fakes", entry_points="[chatlearn]\nfakes = chatlearn_testing.fakes.plugin\n")
    return environment.site
