from __future__ import annotations

import pytest

from chatlearn_testing.fakes.tokenizer import CharacterTokenizer


@pytest.fixture
def tokenizer() -> CharacterTokenizer:
    return CharacterTokenizer()
