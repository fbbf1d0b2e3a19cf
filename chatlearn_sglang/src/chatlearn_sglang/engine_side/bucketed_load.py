"""Loads a model's weights through several calls of its ``load_weights``.

Some SGLang loaders keep a tensor until the tensor arrives that they fuse it with (DeepSeek: ``q_a_proj`` and
``kv_a_proj_with_mqa``), but drop it when the call ends. Tensors that a loader still holds at the end of a bucket are
therefore passed again with the next bucket; loading a tensor twice changes nothing. A loader that collects all tensors
before it loads any receives all buckets together at the end.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

TARGET = "sglang.srt.model_loader.utils.should_async_load"

Named = tuple[str, Tensor]

_open_loads = 0


def register() -> None:
    """Make loaders finish a tensor before they take the next one while a ``BucketedLoad`` is active.

    Then the loader holds exactly the tensors that it keeps, and none that one of its threads has yet to copy.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    HookRegistry.register(TARGET, in_order, HookType.AFTER, source=HookSource("chatlearn_loads", "chatlearn-sglang"))


def in_order(asynchronous: bool, weight: Tensor) -> bool:
    """Disable asynchronous loading while a load is open; runs after ``should_async_load``."""
    return asynchronous and not _open_loads


class BucketedLoad:
    """One load of one rank in one sync."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._held: list[Named] = []
        """Copies of the tensors that the loader still held after the last bucket."""
        self._collected: list[Named] | None = None
        """Copies of all tensors so far, once the loader is known to collect; None before."""

    def give(self, tensors: Iterable[Named]) -> None:
        """Load a bucket. Its tensors need not outlive this call."""
        if self._collected is not None:
            self._collected.extend((name, tensor.clone()) for name, tensor in tensors)
            return
        again, self._held = self._held, []
        bucket = _HoldTracker(_joined(again, tensors))
        self._load(bucket)
        if bucket.num_passed > 1 and len(bucket.held) == bucket.num_passed:
            self._collected = bucket.held
        else:
            self._held = bucket.held

    def finish(self) -> None:
        """End the load after the last bucket."""
        collected, self._held, self._collected = self._collected, [], None
        if collected is not None:
            self._load(collected)

    def _load(self, tensors: Iterable[Named]) -> None:
        global _open_loads
        _open_loads += 1
        try:
            self._model.load_weights(iter(tensors))
        finally:
            _open_loads -= 1


class _HoldTracker:
    """Iterate over tensors and record, at the end, which of them the loader still holds."""

    def __init__(self, tensors: Iterator[Named]) -> None:
        self._tensors = tensors
        self.num_passed = 0
        self.held: list[Named] = []
        """Copies of the tensors that the loader still holds."""

    def __iter__(self) -> Iterator[Named]:
        passed: dict[str, list[weakref.ref[Tensor]]] = {}
        smallest: Named | None = None
        for name, given in self._tensors:
            if smallest is None or given.numel() < smallest[1].numel():
                smallest = name, given.detach()
            tensor = given.detach()  # a new object, which only the loader can hold
            passed.setdefault(name, []).append(weakref.ref(tensor))
            yield name, tensor
            del tensor, given
        self.num_passed = len(passed)
        if self.num_passed > 1 and smallest is not None:
            # A loop variable holds the last tensor even if the loader does not need it: make that the smallest one.
            passed[smallest[0]].append(weakref.ref(smallest[1]))
            yield smallest
        del smallest
        for name, references in passed.items():
            alive = [held for reference in references if (held := reference()) is not None]
            if alive:
                self.held.append((name, alive[0].clone()))


def _joined(again: list[Named], tensors: Iterable[Named]) -> Iterator[Named]:
    """Yield from ``again``, emptying it, then from ``tensors``."""
    again.reverse()
    while again:
        yield again.pop()
    yield from tensors
