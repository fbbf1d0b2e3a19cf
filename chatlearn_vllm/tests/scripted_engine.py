"""An engine that does what a test says, for the drivers."""

from __future__ import annotations

import threading

SURPRISE = 1_000_000_000
"""As ``max_tokens``: taking the request raises an unexpected error."""


class ScriptedEngine:
    """Samples token 7 for every request, as many as it asks for; raises at the requests that a test names."""

    def __init__(self, arguments, *, log_level, num_threads):
        self.wanted = {}
        self.log = []
        self.fail_on = arguments.get("fail_on")
        self.ahead = arguments.get("ahead", [])
        self.entered = threading.Event()
        self.gate = None

    def _do(self, what, *details):
        self.log.append((what, *details))
        if what == self.fail_on:
            raise RuntimeError(f"{what} broke")

    @property
    def has_work(self):
        return bool(self.wanted)

    def facts(self):
        return {"log": self.log}

    def add(self, request):
        if request["max_tokens"] < 0:
            raise ValueError("max_tokens must be positive")
        assert request["max_tokens"] != SURPRISE, "a surprise"
        self.wanted[request["key"]] = request["max_tokens"]

    def step(self):
        if self.gate is not None:
            self.entered.set()
            self.gate.acquire()
        self._do("step", *self.wanted)
        return self._sample()

    def _sample(self):
        reports = []
        for key in list(self.wanted):
            self.wanted[key] -= 1
            done = self.wanted[key] == 0
            reports.append((key, [7], [-1.0], "length" if done else None, None, None))
            if done:
                del self.wanted[key]
        return reports

    def drain(self):
        while self.ahead:
            yield [(self.ahead.pop(), [9], [-1.0], None, None)]

    def abort(self, keys):
        self._do("abort", *keys)
        for key in keys:
            self.wanted.pop(key, None)

    def reset_caches(self):
        self._do("reset_caches")

    def call_workers(self, method, argument=None):
        self._do(method)

    def sleep(self, level):
        self._do("sleep", level)

    def wake(self, parts):
        self._do("wake", *parts)

    def close(self):
        self._do("close")
