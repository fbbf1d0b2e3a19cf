from __future__ import annotations

import logging

import pytest

from chatlearn_core.exceptions import PluginError
from chatlearn_core.plugins.observers import Observer, Observers


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


def test_strict_mode_raises_naming_the_plugin() -> None:
    observers = Observers([Observer("chatlearn_step_end", "bad 1.0", failing, ())], strict=True)
    with pytest.raises(PluginError, match=r"chatlearn_step_end of bad 1\.0 raised ValueError: full disk"):
        observers.step_end(1, {})


def test_strict_mode_does_not_hide_the_error_being_reported() -> None:
    observers = Observers([Observer("chatlearn_error", "bad 1.0", failing, ())], strict=True)
    observers.error(RuntimeError("the real one"))
    assert observers.failures == {("bad 1.0", "chatlearn_error"): 1}
