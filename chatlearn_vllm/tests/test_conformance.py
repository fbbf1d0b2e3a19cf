"""The generator ``vllm`` passes the conformance suite, with the real engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from chatlearn_testing.suites import GeneratorConformance
from chatlearn_vllm.conformance import CLASSIFIER, ENGINE_ARGUMENTS, ENGINE_STATE


@pytest.fixture(scope="module")
def model_directory(model_dir: Callable[..., Path]) -> Path:
    return model_dir()


@pytest.mark.engine
class TestInProcess(GeneratorConformance):
    backend = "vllm"
    load_reference = "chatlearn_hf.plain_forward:load_plain_model"
    engine_arguments = ENGINE_ARGUMENTS
    engine_state = ENGINE_STATE
    classifier = CLASSIFIER
