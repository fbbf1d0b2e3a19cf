"""Event files, read back with TensorBoard's own reader."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from chatlearn_observe.options import TensorBoardOptions

pytest.importorskip("tensorboard")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from chatlearn_observe.tensorboard_logger import TensorBoardLogger


def scalars(directory: Path, name: str) -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(name)]


def test_every_metric_is_a_scalar_of_its_name(tmp_path: Path) -> None:
    logger = TensorBoardLogger(TensorBoardOptions(), tmp_path)
    logger.start({"name": "run"})
    logger.log(1, {"reward": 0.25, "policy/entropy": 1.5})
    logger.log(2, {"reward": float("nan")})
    logger.close()
    logger.close()
    rewards = scalars(tmp_path / "tensorboard", "reward")
    assert rewards[0] == (1, 0.25)
    assert rewards[1][0] == 2
    assert math.isnan(rewards[1][1])
    assert scalars(tmp_path / "tensorboard", "policy/entropy") == [(1, 1.5)]


def test_the_configuration_is_kept_as_text(tmp_path: Path) -> None:
    logger = TensorBoardLogger(TensorBoardOptions(directory=str(tmp_path / "elsewhere")), tmp_path / "run")
    logger.start({"name": "sums", "train": {"steps": 3}})
    logger.log(0, {})
    logger.close()
    accumulator = EventAccumulator(str(tmp_path / "elsewhere"))
    accumulator.Reload()
    [event] = accumulator.Tensors("config/text_summary")
    assert event.tensor_proto.string_val[0].decode() == "    name: sums\n    train:\n      steps: 3\n"


def test_a_resumed_run_replaces_the_steps_it_makes_again(tmp_path: Path) -> None:
    first = TensorBoardLogger(TensorBoardOptions(), tmp_path)
    first.start({})
    for step in (1, 2, 3):
        first.log(step, {"reward": float(step)})
    first.close()
    resumed = TensorBoardLogger(TensorBoardOptions(), tmp_path)
    resumed.start({})
    for step in (2, 3, 4):
        resumed.log(step, {"reward": 10.0 * step})
    resumed.close()
    assert scalars(tmp_path / "tensorboard", "reward") == [(1, 1.0), (2, 20.0), (3, 30.0), (4, 40.0)]


def test_a_run_that_ends_before_its_first_step_leaves_no_file(tmp_path: Path) -> None:
    logger = TensorBoardLogger(TensorBoardOptions(), tmp_path)
    logger.start({"name": "run"})
    logger.close()
    assert list(tmp_path.iterdir()) == []
