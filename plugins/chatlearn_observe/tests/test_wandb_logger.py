"""What the logger asks of wandb, recorded by a stand-in with wandb's signatures."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from chatlearn_core.exceptions import ChatLearnError
from chatlearn_observe.options import WandbOptions


class FakeRun:
    def __init__(self, id: str) -> None:
        self.id = id
        self.logged: list[dict[str, Any]] = []
        self.defined: list[tuple[str, str | None]] = []
        self.num_finished = 0

    def log(self, data: dict[str, Any]) -> None:
        self.logged.append(data)

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.defined.append((name, step_metric))

    def finish(self) -> None:
        self.num_finished += 1


class FakeWandb(ModuleType):
    class Error(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("wandb")
        self.asked: list[dict[str, Any]] = []
        self.runs: list[FakeRun] = []
        self.refusal: Exception | None = None

    def init(self, **arguments: Any) -> FakeRun:
        if self.refusal:
            raise self.refusal
        self.asked.append(arguments)
        self.runs.append(FakeRun(arguments["id"] or "fresh1"))
        return self.runs[-1]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delitem(sys.modules, "chatlearn_observe.wandb_logger", raising=False)
    return fake


def logger_of(options: WandbOptions, run_dir: Path) -> Any:
    return importlib.import_module("chatlearn_observe.wandb_logger").WandbLogger(options, run_dir)


def test_options_and_configuration_are_passed_on(wandb: FakeWandb, tmp_path: Path) -> None:
    logger = logger_of(WandbOptions(project="sums", entity="team", tags=["a"], mode="offline"), tmp_path)
    logger.start({"name": "run 7", "seed": 3})
    [asked] = wandb.asked
    assert asked == {
        "project": "sums",
        "entity": "team",
        "name": "run 7",
        "tags": ["a"],
        "mode": "offline",
        "id": None,
        "resume": "allow",
        "dir": str(tmp_path),
        "config": {"name": "run 7", "seed": 3},
    }


def test_metrics_are_drawn_over_the_step_and_the_run_is_finished_once(wandb: FakeWandb, tmp_path: Path) -> None:
    logger = logger_of(WandbOptions(), tmp_path)
    logger.start({})
    logger.log(4, {"reward": 0.5})
    logger.close()
    logger.close()
    [run] = wandb.runs
    assert run.logged == [{"reward": 0.5, "step": 4}]
    assert run.defined == [("step", None), ("*", "step")]
    assert run.num_finished == 1


def test_a_resumed_run_continues_the_same_wandb_run(wandb: FakeWandb, tmp_path: Path) -> None:
    for _ in range(2):
        logger = logger_of(WandbOptions(), tmp_path)
        logger.start({})
        logger.close()
    assert [asked["id"] for asked in wandb.asked] == [None, "fresh1"]


def test_a_refusal_says_what_to_do(wandb: FakeWandb, tmp_path: Path) -> None:
    wandb.refusal = wandb.Error("api_key not configured")
    with pytest.raises(ChatLearnError, match=r"'sums'.*api_key not configured.*wandb login.*mode: offline"):
        logger_of(WandbOptions(project="sums"), tmp_path).start({})
