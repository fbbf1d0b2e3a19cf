"""Measures the time of an update's phases on the device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from chatlearn_core.types import Metric, Metrics


class PhaseTimer:
    """Sums the time of named phases; on a GPU it uses events, so that timing does not make the device wait.

    Args:
        device: device of the phases.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the code inside the context."""
        if self._cuda:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch
            start.record()
            yield
            stop.record()
            self._events.append((name, start, stop))
            return
        began = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

    def metrics(self) -> Metrics:
        """Return ``timing_s/<phase>`` in seconds, reducer sum. Waits for the device."""
        for name, start, stop in self._events:
            stop.synchronize()
            self._seconds[name] = self._seconds.get(name, 0.0) + start.elapsed_time(stop) / 1e3
        self._events.clear()
        return {f"timing_s/{name}": Metric(seconds, 1.0, "sum") for name, seconds in self._seconds.items()}
