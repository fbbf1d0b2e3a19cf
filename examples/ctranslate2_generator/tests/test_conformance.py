"""The contract of generators, on a tiny Qwen3."""

from __future__ import annotations

from pathlib import Path

import pytest

from chatlearn_hf.tiny import build_tiny_model
from chatlearn_testing.suites import GeneratorConformance


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3", initializer_range=0.2)


class TestCTranslate2(GeneratorConformance):
    backend = "ctranslate2"
    load_reference = "chatlearn_hf.plain_forward:load_plain_model"
