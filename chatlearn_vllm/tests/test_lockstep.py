"""Several drivers in lockstep, with engines whose steps wait for each other as vLLM's do."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import Counter, defaultdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatlearn_vllm.engine_side import driver as driver_module
from chatlearn_vllm.engine_side.lockstep import LockstepDriver

from .scripted_engine import ScriptedEngine

PATIENCE_S = 20


class Peers:
    """A collective of threads: each waits for all others, and all must request the same operation."""

    def __init__(self, size):
        self.size = size
        self._came = threading.Condition()
        self._brought = defaultdict(dict)
        """By number of the meeting: what each rank came for, and with what."""
        self._next = [0] * size
        self._has_left = False

    def meet(self, rank, what, values=()):
        with self._came:
            brought = self._brought[self._next[rank]]
            self._next[rank] += 1
            brought[rank] = (what, values)
            self._came.notify_all()
            self._came.wait_for(lambda: len(brought) == self.size or self._has_left, PATIENCE_S)
            if len(brought) < self.size:
                raise ConnectionError(f"rank {rank} is alone in {what}")
        assert {what} == {what for what, _ in brought.values()}, f"the ranks met for {brought}"
        return [values for _, values in brought.values()]

    def leave(self):
        """As a process that ends: those who wait for it hear of it."""
        with self._came:
            self._has_left = True
            self._came.notify_all()


class RankEngine(ScriptedEngine):
    """One of several, whose steps wait for each other's."""

    def __init__(self, arguments, *, log_level, num_threads):
        super().__init__(arguments, log_level=log_level, num_threads=num_threads)
        self.peers, self.rank = arguments["peers"], arguments["rank"]
        self.dummies = 0
        self.on_live_bytes = lambda: None

    def facts(self):
        return {"engine": self}

    def agree(self, told, *, busy, closing):
        found = self.peers.meet(self.rank, "agree", (told, busy, closing))
        return min(told for told, _, _ in found), any(busy for _, busy, _ in found), any(c for _, _, c in found)

    def step(self):
        self._do("step")
        if self.gate is not None:
            self.gate.acquire()
        self.dummies += not self.wanted
        self.peers.meet(self.rank, "step")
        return self._sample()

    def live_bytes(self, part):
        self._do("live_bytes", part)
        self.on_live_bytes()
        return 1

    def close(self):
        super().close()
        self.peers.leave()


class Fleet:
    """All ranks' drivers, with their events and engines."""

    def __init__(self, size):
        peers = Peers(size)
        self.size = size
        self.events = [queue.Queue() for _ in range(size)]
        self.drivers = [LockstepDriver(events.put) for events in self.events]
        futures = [
            driver.start({"peers": peers, "rank": rank}, "error", None) for rank, driver in enumerate(self.drivers)
        ]
        self.engines = [future.result(PATIENCE_S)["engine"] for future in futures]

    def tell(self, rank, method, *arguments):
        """One rank hears of it; a future, where the method has one."""
        return getattr(self.drivers[rank], method)(*arguments)

    def tell_all(self, method, *arguments):
        return [self.tell(rank, method, *arguments) for rank in range(self.size)]

    def ask_all(self, method, *arguments):
        for future in self.tell_all(method, *arguments):
            future.result(PATIENCE_S)

    def submit(self, *shares):
        for rank, requests in enumerate(shares):
            self.tell(rank, "submit", requests)

    def tokens(self, rank, ends):
        """How many tokens each request of a rank was told, once ``ends`` of them are over."""
        counts, over = Counter(), 0
        while over < ends:
            kind, _, reports = self.events[rank].get(timeout=PATIENCE_S)
            assert kind == "tokens", reports
            for key, ids, _, reason, *_ in reports:
                counts[key] += len(ids)
                over += reason is not None
        return counts

    def close(self):
        for driver in self.drivers:
            driver.close()


@pytest.fixture
def start(monkeypatch):
    """``start(size)``: a fleet."""
    monkeypatch.setattr(driver_module, "Engine", RankEngine)
    fleets = []

    def make(size=2):
        fleets.append(Fleet(size))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()


def ask(key, max_tokens=2):
    return {"key": key, "max_tokens": max_tokens}


def test_a_rank_without_requests_takes_part_in_every_step(start):
    fleet = start(3)
    fleet.submit([ask(1, 5)], [], [ask(2, 2)])
    assert fleet.tokens(0, ends=1) == {1: 5}
    assert fleet.tokens(2, ends=1) == {2: 2}
    fleet.ask_all("live_bytes", "weights")
    assert [engine.log for engine in fleet.engines] == [[("step",)] * 5 + [("live_bytes", "weights")]] * 3
    assert [engine.dummies for engine in fleet.engines] == [0, 5, 3]
    assert fleet.events[1].empty()


def test_a_request_that_one_rank_refuses_ends_the_steps_of_all(start):
    fleet = start()
    fleet.submit([ask(1, -1)], [])
    assert fleet.events[0].get(timeout=PATIENCE_S) == ("refused", 1, "max_tokens must be positive")
    fleet.ask_all("live_bytes", "weights")
    assert [engine.log for engine in fleet.engines] == [[("live_bytes", "weights")]] * 2


def test_stepping_stops_once_all_requests_are_dropped(start):
    """Told in one go while both ranks step: what follows the drop finds engines at rest, as a sleep needs."""
    fleet = start()
    gate = fleet.engines[0].gate = threading.Semaphore(0)
    fleet.submit([ask(1, 100)], [])
    wait_until(lambda: fleet.engines[0].log)
    fleet.tell_all("drop", [1])
    sleeping = fleet.tell_all("sleep", 1)
    gate.release(1000)
    for future in sleeping:
        future.result(PATIENCE_S)
    fleet.ask_all("live_bytes", "weights")
    for engine in fleet.engines:
        assert engine.log == [("step",), ("abort", 1), ("sleep", 1), ("live_bytes", "weights")]


def test_a_pause_falls_between_the_same_steps_even_if_one_rank_receives_it_late(start):
    fleet = start()
    fleet.submit([ask(1, 10**6)], [ask(2, 10**6)])
    early = fleet.tell(0, "pause")
    wait_until(lambda: fleet.events[1].qsize() > 20)
    assert not early.done()
    late = fleet.tell(1, "pause")
    for future in (early, late):
        future.result(PATIENCE_S)
    assert fleet.engines[0].log == fleet.engines[1].log
    assert fleet.engines[0].wanted == {1: fleet.engines[1].wanted[2]}
    fleet.ask_all("live_bytes", "weights")
    fleet.ask_all("abort", [1, 2])
    fleet.ask_all("resume")


def test_weights_load_between_the_same_steps_and_later_tokens_have_the_new_version(start):
    fleet = start()
    fleet.submit([ask(1, 10**6)], [])
    wait_until(lambda: fleet.events[0].qsize() > 3)
    fleet.ask_all("begin_update")
    fleet.ask_all("load", "tensors", [], {})
    fleet.ask_all("finish_update", 3, True)
    wait_until(lambda: fleet.events[0].queue[-1][1] == 3)
    fleet.ask_all("pause")
    assert fleet.engines[0].log == fleet.engines[1].log
    at = fleet.engines[0].log.index(("start_weight_update",))
    assert fleet.engines[0].log[at : at + 4] == [
        ("start_weight_update",),
        ("update_weights",),
        ("finish_weight_update",),
        ("reset_caches",),
    ]


def test_a_steady_flow_of_commands_does_not_starve_requests(start):
    fleet = start()
    for engine, driver in zip(fleet.engines, fleet.drivers, strict=True):
        engine.on_live_bytes = lambda driver=driver: driver.live_bytes("weights")
    fleet.tell_all("live_bytes", "weights")
    fleet.submit([ask(1, 20)], [])
    assert fleet.tokens(0, ends=1) == {1: 20}


def test_closing_one_rank_while_all_step_ends_all_without_an_error(start):
    fleet = start()
    fleet.submit([ask(1, 10**6)], [])
    wait_until(lambda: fleet.events[0].qsize() > 3)
    fleet.drivers[0].close()
    wait_until(lambda: fleet.events[1].qsize() > 0)
    assert fleet.events[1].get() == ("dead", "the engine was closed", None)


def test_a_failed_engine_does_not_leave_other_ranks_waiting_in_a_step(start):
    fleet = start()
    fleet.engines[1].fail_on = "step"
    fleet.submit([ask(1, 10)], [])
    kind, reason, _ = fleet.events[1].get(timeout=PATIENCE_S)
    assert (kind, reason.splitlines()[0]) == ("dead", "RuntimeError: step broke")
    kind, reason, _ = fleet.events[0].get(timeout=PATIENCE_S)
    assert (kind, reason.splitlines()[0]) == ("dead", "ConnectionError: rank 0 is alone in step")


MESSAGES = st.one_of(
    st.tuples(st.just("submit"), st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 6)), min_size=1, max_size=4)),
    st.tuples(st.just("drop"), st.integers(0, 9)),
    st.tuples(st.just("abort"), st.integers(0, 9)),
    st.tuples(st.sampled_from(["pause", "resume", "update", "sleep", "live_bytes"]), st.none()),
)


def conversation(size, drawn):
    """Turn what was drawn into calls: (method, arguments by rank), ended by what lets all requests come to an end."""
    calls, keys = [], []
    for kind, detail in drawn:
        if kind == "submit":
            shares = [[] for _ in range(size)]
            for rank, max_tokens in detail:
                keys.append(len(keys))
                shares[rank % size].append(ask(keys[-1], max_tokens or 1))
            calls.append(("submit", [(share,) for share in shares]))
        elif kind in ("drop", "abort"):
            calls.append((kind, [([key for key in keys if key % 10 == detail],)] * size))
        elif kind == "update":
            calls += [
                ("begin_update", [()] * size),
                ("load", [("tensors", [], {})] * size),
                ("finish_update", [(len(calls), True)] * size),
            ]
        else:
            arguments = {"sleep": (0,), "live_bytes": ("weights",)}.get(kind, ())
            calls.append((kind, [arguments] * size))
    return [*calls, ("resume", [()] * size), ("live_bytes", [("kv_cache",)] * size)]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(2, 3), drawn=st.lists(MESSAGES, max_size=12), seed=st.integers(0, 2**32))
def test_all_ranks_run_the_same_commands_between_the_same_steps_whatever_the_delay(start, size, drawn, seed):
    fleet, order = start(size), random.Random(seed)
    calls = conversation(size, drawn)
    heard, last = [0] * size, []
    while any(count < len(calls) for count in heard):
        rank = order.choice([rank for rank in range(size) if heard[rank] < len(calls)])
        for _ in range(order.randint(1, 4)):
            if heard[rank] < len(calls):
                method, shares = calls[heard[rank]]
                last.append(fleet.tell(rank, method, *shares[rank]))
                heard[rank] += 1
        if order.random() < 0.3:
            time.sleep(order.choice([0.0, 0.0005]))
    for future in last:
        if future is not None:
            future.result(PATIENCE_S)
    wait_until(lambda: not any(engine.wanted for engine in fleet.engines))
    fleet.ask_all("live_bytes", "weights")
    logs = [engine.log for engine in fleet.engines]
    assert all(log == logs[0] for log in logs)
    fleet.close()
    for events in fleet.events:
        assert [event for event in events.queue if event[0] == "dead"] == [("dead", "the engine was closed", None)]


def wait_until(holds):
    """Give the other threads their turns."""
    for _ in range(PATIENCE_S * 1000):
        if holds():
            return
        time.sleep(0.001)
    raise AssertionError("it never came to that")
