"""The generator ``transformers`` passes the conformance suite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from chatlearn_testing.suites import GeneratorConformance


@pytest.fixture(scope="module")
def model_directory(model_dir: Callable[..., Path]) -> Path:
    return model_dir()


@pytest.mark.engine
class TestTransformers(GeneratorConformance):
    backend = "transformers"
    load_reference = "chatlearn_hf.plain_forward:load_plain_model"


@pytest.mark.gpu
class TestTransformersOnAGPU(TestTransformers):
    device = "cuda"
