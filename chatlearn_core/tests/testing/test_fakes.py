"""The fakes pass the suites: what unit tests are built on keeps the protocols."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from chatlearn_core.testing.fakes import records
from chatlearn_core.testing.fakes.bigram import build_bigram_model
from chatlearn_core.testing.suites import (
    GeneratorConformance,
    RewardCase,
    RewardConformance,
    TrainerConformance,
    WeightSyncConformance,
)

PLAIN = "chatlearn_core.testing.fakes.bigram:load_bigram_model"


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_bigram_model(tmp_path_factory.mktemp("bigram") / "model")


class TestFakeTrainer(TrainerConformance):
    backend = records.FAKE_TRAINER
    load_reference = PLAIN
    options: ClassVar = {"learning_rate": 0.1}


class TestFakeGenerator(GeneratorConformance):
    backend = records.FAKE_GENERATOR
    load_reference = PLAIN


class TestFakeReward(RewardConformance):
    backend = records.FAKE_REWARD
    options: ClassVar = {"target": 7}
    cases = (
        RewardCase("", None, token_ids=()),
        RewardCase("half", 0.5, token_ids=(7, 1)),
        RewardCase("all", 1.0, token_ids=(7, 7, 7)),
        RewardCase("none", 0.0, token_ids=(1,)),
    )


class TestFakeWeightSync(WeightSyncConformance):
    backend = records.FAKE_WEIGHT_SYNC


class TestFakeBoxSync(WeightSyncConformance):
    backend = records.FAKE_BOX_SYNC


@pytest.mark.slow  # every replica starts a process that imports torch
class TestGeneratorInAnotherInterpreter(GeneratorConformance):
    """The protocol holds when every call crosses a process border."""

    backend = records.REMOTE_FAKE_GENERATOR
    load_reference = PLAIN
