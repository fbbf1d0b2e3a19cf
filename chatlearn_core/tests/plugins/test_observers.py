from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chatlearn_core.exceptions import ChatLearnError, PluginError
from chatlearn_core.flow import Graph
from chatlearn_core.plugins.observers import Observer, Observers
from chatlearn_core.protocols import PlainData
from chatlearn_core.types import RunFailure, SyncReceipt

GRAPH = Graph("reading", (), {"trainer": "trainer"})
FAILURE = RunFailure(
    "mine", "scoring", 1.0, 3, 2, 9, "Nothing is saved.", Path("runs/mine"), ({"event": "x"},), 5.0, {}
)


def failing(*_: object, **__: object) -> None:
    raise ValueError("full disk")


def test_each_observer_gets_the_arguments_it_takes() -> None:
    calls = []
    observers = Observers(
        [
            Observer("chatlearn_step_end", "a 1", lambda: calls.append("a"), ()),
            Observer(
                "chatlearn_step_end", "b 1", lambda metrics, step: calls.append((metrics, step)), ("metrics", "step")
            ),
            Observer("chatlearn_error", "c 1", lambda: calls.append("c"), ()),
        ]
    )
    observers.step_end(3, {"loss": 1.0})
    assert calls == ["a", ({"loss": 1.0}, 3)]


@pytest.mark.parametrize("error", [ValueError("full disk"), SystemExit(1)])
def test_one_that_raises_is_counted_and_logged_and_stops_nobody(caplog, error: BaseException) -> None:
    def raising() -> None:
        raise error

    calls: list[int] = []
    observers = Observers(
        [
            Observer("chatlearn_step_end", "bad 1", raising, ()),
            Observer("chatlearn_step_end", "good 1", lambda step: calls.append(step), ("step",)),
        ]
    )
    with caplog.at_level(logging.WARNING):
        observers.step_end(1, {})
        observers.step_end(2, {})
    assert calls == [1, 2]
    assert observers.failures == {("bad 1", "chatlearn_step_end"): 2}
    assert [record.exc_info is not None for record in caplog.records] == [True, False]
    assert "failure 2" in caplog.text


def test_an_interrupt_is_not_swallowed() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Observers([Observer("chatlearn_step_end", "a 1", interrupted, ())]).step_end(1, {})


@pytest.mark.parametrize(("error", "bug"), [(ChatLearnError("cannot write a file"), False), (ValueError("no"), True)])
def test_a_traceback_is_logged_of_bugs_only(caplog: Any, error: Exception, bug: bool) -> None:
    def raising() -> None:
        raise error

    Observers([Observer("chatlearn_step_end", "a 1", raising, ())]).step_end(1, {})
    assert str(error) in caplog.text
    assert ("Traceback" in caplog.text) is bug


def test_strict_mode_raises_naming_the_plugin() -> None:
    observers = Observers([Observer("chatlearn_step_end", "bad 1.0", failing, ())], strict=True)
    with pytest.raises(PluginError, match=r"chatlearn_step_end of bad 1\.0 raised ValueError: full disk"):
        observers.step_end(1, {})


def test_strict_mode_does_not_hide_the_error_being_reported() -> None:
    observers = Observers([Observer("chatlearn_error", "bad 1.0", failing, ())], strict=True)
    observers.error(RuntimeError("the real one"), FAILURE)
    assert observers.failures == {("bad 1.0", "chatlearn_error"): 1}


def test_each_observer_has_copies_of_its_own() -> None:
    seen: list[object] = []

    def vandal(**arguments: Any) -> None:
        for value in arguments.values():
            value.clear()

    def run(hook: str, argument: str, notify: Callable[[Observers], None]) -> None:
        observers = Observers(
            [
                Observer(hook, "vandal 1", vandal, (argument,)),
                Observer(hook, "watcher 1", lambda **kw: seen.append(kw[argument]), (argument,)),
            ]
        )
        notify(observers)

    receipts = [SyncReceipt(0, 1, "serving")]
    config: dict[str, Any] = {"model": {"path": "here"}, "data": [1]}
    summary, line = {"totals": {"samples/trained": 3.0}}, {"loss": 1.0}
    run("chatlearn_run_start", "config", lambda o: o.run_start(config, Path(), GRAPH))
    run("chatlearn_run_start", "graph", lambda o: o.run_start(config, Path(), GRAPH))
    run("chatlearn_error", "failure", lambda o: o.error(ValueError("no"), FAILURE))
    run("chatlearn_rollout_end", "metrics", lambda o: o.rollout_end(1, [], line, PlainData()))
    run("chatlearn_step_end", "metrics", lambda o: o.step_end(1, line))
    run("chatlearn_weights_synced", "receipts", lambda o: o.weights_synced(1, receipts))
    run("chatlearn_run_end", "summary", lambda o: o.run_end("completed", summary))
    assert seen == [config, GRAPH, FAILURE, line, line, receipts, summary], "the second observer sees what the run gave"
    assert seen[1] is not GRAPH
    assert seen[2] is not FAILURE
    assert (config["model"], len(receipts)) == ({"path": "here"}, 1)
    assert summary == {"totals": {"samples/trained": 3.0}}
    assert line == {"loss": 1.0}


def test_a_copy_that_an_observer_changes_deep_inside_is_its_own() -> None:
    config: dict[str, Any] = {"roles": {"trainer": {"options": {"lr": 1.0}}}}

    def vandal(config: Any) -> None:
        config["roles"]["trainer"]["options"]["lr"] = 2.0

    Observers([Observer("chatlearn_run_start", "a 1", vandal, ("config",))]).run_start(config, Path(), GRAPH)
    assert config == {"roles": {"trainer": {"options": {"lr": 1.0}}}}


def test_random_numbers_of_an_observer_are_no_others() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def reseed() -> None:
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        draw()
        raise ValueError("after drawing")

    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    expected = [draw(), draw()]
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    found = [draw()]
    Observers([Observer("chatlearn_step_end", "a 1", reseed, ())]).step_end(1, {})
    assert [*found, draw()] == expected
