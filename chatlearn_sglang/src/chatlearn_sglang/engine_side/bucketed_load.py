"""One load of a model's weights, in several calls of its ``load_weights``.

Some loaders of SGLang keep a tensor until another one has come that they fuse it with (DeepSeek: ``q_a_proj`` and
``kv_a_proj_with_mqa``), and forget it when the call ends. So what a loader still holds at the end of a bucket is given
to it again with the next one: loading a tensor twice changes nothing. A loader that collects all it gets before it
loads any is given all buckets at once, at the end.
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
    """Let loaders finish a tensor before they take the next, while one of ours runs: they then hold what they keep,
    not what a thread of theirs has yet to copy.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    HookRegistry.register(TARGET, in_order, HookType.AFTER, source=HookSource("chatlearn_loads", "chatlearn-sglang"))


def in_order(asynchronous: bool, weight: Tensor) -> bool:
    """Called after ``should_async_load``."""
    return asynchronous and not _open_loads


class BucketedLoad:
    """What one rank was given of one sync."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._held: list[Named] = []
        """Copies of what the loader kept."""
        self._collected: list[Named] | None = None
        """Copies of all that came, once the loader is known to collect."""

    def give(self, tensors: Iterable[Named]) -> None:
        """Load a bucket, whose tensors need not outlive this call."""
        if self._collected is not None:
            self._collected.extend((name, tensor.clone()) for name, tensor in tensors)
            return
        again, self._held = self._held, []
        bucket = _Watched(_joined(again, tensors))
        self._load(bucket)
        if bucket.num_passed > 1 and len(bucket.held) == bucket.num_passed:
            self._collected = bucket.held
        else:
            self._held = bucket.held

    def finish(self) -> None:
        """The last bucket has been given."""
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


class _Watched:
    """Passes tensors on and notes, when they have ended, which of them somebody still holds."""

    def __init__(self, tensors: Iterator[Named]) -> None:
        self._tensors = tensors
        self.num_passed = 0
        self.held: list[Named] = []
        """Copies."""

    def __iter__(self) -> Iterator[Named]:
        passed: dict[str, list[weakref.ref[Tensor]]] = {}
        smallest: Named | None = None
        for name, given in self._tensors:
            if smallest is None or given.numel() < smallest[1].numel():
                smallest = name, given.detach()
            tensor = given.detach()  # an object of ours, which only the loader can hold
            passed.setdefault(name, []).append(weakref.ref(tensor))
            yield name, tensor
            del tensor, given
        self.num_passed = len(passed)
        if self.num_passed > 1 and smallest is not None:
            # A loop holds its last tensor, whether its loader needs it or not: let that be a small one.
            passed[smallest[0]].append(weakref.ref(smallest[1]))
            yield smallest
        del smallest
        for name, references in passed.items():
            alive = [held for reference in references if (held := reference()) is not None]
            if alive:
                self.held.append((name, alive[0].clone()))


def _joined(again: list[Named], tensors: Iterable[Named]) -> Iterator[Named]:
    """``again``, which is emptied, then ``tensors``."""
    again.reverse()
    while again:
        yield again.pop()
    yield from tensors
