"""The fakes pass the suites: what unit tests are built on keeps the protocols."""

from __future__ import annotations

import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from chatlearn_testing.fakes import records
from chatlearn_testing.fakes.bigram import build_bigram_model
from chatlearn_testing.fakes.remote_generator import RemoteFakeGenerator
from chatlearn_testing.suites import (
    GeneratorConformance,
    RewardCase,
    RewardConformance,
    TrainerConformance,
    WeightSyncConformance,
)
from chatlearn_testing.suites.generator_fixtures import Replica

PLAIN = "chatlearn_testing.fakes.bigram:load_bigram_model"


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
    options: ClassVar = {"seconds_per_token": 0.003}
    load_reference = PLAIN

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def started_prefixes(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
        """Children run the interpreter of an environment of their own, which notes the ``sys.prefix`` of every start.

        It sees the packages of this one through a .pth file, so that nothing has to be installed.
        """
        directory = tmp_path_factory.mktemp("environment")
        started = directory / "started"
        venv.create(directory, with_pip=False, symlinks=True)
        packages = sysconfig.get_path("purelib", vars={"base": str(directory)})
        Path(packages, "borrowed.pth").write_text(
            f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
            f"import sys; open({str(started)!r}, 'a').write(sys.prefix + '\\n')\n"
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RemoteFakeGenerator, "python", str(directory / "bin" / "python"))
            yield started

    def test_the_child_has_another_prefix(self, started_prefixes: Path, replica: Replica) -> None:
        assert replica.generator.health() is None
        prefixes = set(started_prefixes.read_text().splitlines())
        assert prefixes == {str(started_prefixes.parent)}
        assert sys.prefix not in prefixes
