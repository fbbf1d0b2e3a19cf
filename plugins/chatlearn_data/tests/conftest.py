"""Real rows of the published datasets, and where the whole files are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DATA_VARIABLE = "CHATLEARN_TEST_DATA"


@pytest.fixture(scope="session")
def published_data() -> Path:
    """The folder with the raw ``gsm8k/`` and ``math/`` files."""
    folder = os.environ.get(DATA_VARIABLE)
    if not folder:
        pytest.skip(f"{DATA_VARIABLE} names no folder with the raw gsm8k/ and math/ files")
    return Path(folder)
