"""The engine's thread, with an engine that does what a test says."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from chatlearn_vllm.engine_side import driver as driver_module
from chatlearn_vllm.engine_side.driver import EngineDriver

from .scripted_engine import SURPRISE, ScriptedEngine

PATIENCE_S = 20


@pytest.fixture
def start(monkeypatch):
    """``start(**script)``: (driver, queue of its events, log of its engine)"""
    monkeypatch.setattr(driver_module, "Engine", ScriptedEngine)
    made = []

    def make(**script):
        events = queue.Queue()
        driver = EngineDriver(events.put)
        made.append(driver)
        facts = driver.start(script, "error", None).result(PATIENCE_S)
        return driver, events, facts["log"]

    yield make
    for driver in made:
        driver.close()


def ask(key, max_tokens=2):
    return {"key": key, "max_tokens": max_tokens}


def test_requests_are_stepped_together_until_they_end(start):
    driver, events, _ = start()
    driver.submit([ask(1), ask(2, 3)])
    told = [events.get(timeout=PATIENCE_S) for _ in range(3)]
    assert [(version, [report[0] for report in reports]) for _, version, reports in told] == [
        (0, [1, 2]),
        (0, [1, 2]),
        (0, [2]),
    ]
    assert [report[3] for _, _, reports in told for report in reports] == [None, None, "length", None, "length"]


def test_a_refused_request_does_not_affect_others(start):
    driver, events, _ = start()
    driver.submit([ask(1, -1), ask(2, 1)])
    assert events.get(timeout=PATIENCE_S) == ("refused", 1, "max_tokens must be positive")
    assert events.get(timeout=PATIENCE_S)[2][0][0] == 2


def test_an_unexpected_error_of_a_request_is_reported_too(start):
    driver, events, _ = start()
    driver.submit([ask(1, SURPRISE), ask(2, 1)])
    assert events.get(timeout=PATIENCE_S)[:2] == ("refused", 1)
    assert events.get(timeout=PATIENCE_S)[2][0][0] == 2


def test_an_engine_that_cannot_drop_a_request_is_dead(start):
    driver, events, _ = start(fail_on="abort")
    driver.drop([1])
    kind, reason, _ = events.get(timeout=PATIENCE_S)
    assert (kind, reason.splitlines()[0]) == ("dead", "RuntimeError: abort broke")


def test_nothing_is_stepped_while_paused_and_all_of_it_afterwards(start):
    driver, events, log = start()
    driver.pause().result(PATIENCE_S)
    driver.submit([ask(1, 1)])
    driver.abort([]).result(PATIENCE_S)
    assert events.empty()
    assert ("step", 1) not in log
    driver.resume()
    assert events.get(timeout=PATIENCE_S)[2][0][:2] == (1, [7])


def test_steps_scheduled_ahead_are_reported_before_a_pause_completes(start):
    driver, events, _ = start(ahead=[5, 5])
    driver.pause().result(PATIENCE_S)
    assert [events.get_nowait()[2][0][0] for _ in range(2)] == [5, 5]


def test_a_sync_changes_the_version_of_what_is_sampled_after_it(start):
    driver, events, log = start()
    driver.begin_update().result(PATIENCE_S)
    driver.submit([ask(1, 1)])
    driver.load("tensors", [], {}).result(PATIENCE_S)
    assert events.empty()
    driver.finish_update(3, True).result(PATIENCE_S)
    assert events.get(timeout=PATIENCE_S)[:2] == ("tokens", 3)
    order = [entry[0] for entry in log if entry[0] != "step"]
    assert order[-4:] == ["start_weight_update", "update_weights", "finish_weight_update", "reset_caches"]


def test_a_sync_of_an_adapter_leaves_the_base_alone(start):
    driver, _, log = start()
    driver.begin_adapter().result(PATIENCE_S)
    driver.finish_update(1, False).result(PATIENCE_S)
    assert "finish_weight_update" not in [entry[0] for entry in log]


def test_an_error_belongs_to_its_call_only(start):
    driver, events, _ = start(fail_on="sleep")
    with pytest.raises(RuntimeError, match="sleep broke"):
        driver.sleep(1).result(PATIENCE_S)
    driver.submit([ask(1, 1)])
    assert events.get(timeout=PATIENCE_S)[0] == "tokens"


def wait_until(holds):
    """Give the other thread its turns."""
    for _ in range(PATIENCE_S * 1000):
        if holds():
            return
        time.sleep(0.001)
    raise AssertionError("it never came to that")


def hold(driver):
    """(engine, gate): the engine's steps wait at the gate."""
    engine, gate = driver._engine, threading.Semaphore(0)
    engine.gate = gate
    return engine, gate


def test_an_engine_that_fails_in_a_step_fails_all_queued_and_later_calls(start):
    driver, events, _ = start()
    engine, gate = hold(driver)
    engine.fail_on = "step"
    driver.submit([ask(1)])
    assert engine.entered.wait(PATIENCE_S)
    waiting = driver.sleep(1)
    gate.release()
    kind, reason, _ = events.get(timeout=PATIENCE_S)
    assert kind == "dead"
    assert reason.startswith("RuntimeError: step broke")
    for future in (waiting, driver.resume()):
        with pytest.raises(RuntimeError, match="step broke"):
            future.result(PATIENCE_S)


def test_closing_fails_queued_calls_and_ends_the_engine(start):
    driver, events, log = start()
    engine, gate = hold(driver)
    driver.submit([ask(1, 100)])
    assert engine.entered.wait(PATIENCE_S)
    waiting = driver.sleep(1)
    closing = threading.Thread(target=driver.close)
    closing.start()
    wait_until(lambda: driver._closing)
    gate.release()
    closing.join(PATIENCE_S)
    assert log[-1] == ("close",)
    for future in (waiting, driver.resume()):
        with pytest.raises(RuntimeError, match="the engine was closed"):
            future.result(PATIENCE_S)
    driver.close()
    assert [event for event in events.queue if event[0] == "dead"] == [("dead", "the engine was closed", None)]


def test_a_failed_start_is_reported_to_its_caller(monkeypatch):
    def refuse(*_, **__):
        raise ValueError("no such model")

    monkeypatch.setattr(driver_module, "Engine", refuse)
    driver = EngineDriver(lambda _: None)
    with pytest.raises(ValueError, match="no such model"):
        driver.start({}, "error", None).result(PATIENCE_S)
    driver.close()
