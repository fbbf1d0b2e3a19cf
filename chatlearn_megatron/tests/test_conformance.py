"""The trainer ``megatron`` passes the conformance suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from chatlearn_hf.tiny import build_tiny_model
from chatlearn_megatron.conformance import ENGINE_STATE, RANK_LAYOUTS
from chatlearn_testing.suites import TrainerConformance


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


@pytest.mark.engine
class TestMegatron(TrainerConformance):
    backend = "megatron"
    load_reference = "chatlearn_hf.plain_forward:load_plain_model"
    rank_layouts = RANK_LAYOUTS
    engine_state = ENGINE_STATE


@pytest.mark.gpu
class TestMegatronOnAGPU(TestMegatron):
    device = "cuda"
