"""One broadcast in flight, which signals its end: polling for it would take as long as sending a bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from chatlearn_hosting.engine_side.groups import SenderGroup

GLANCE_S = 0.0005
"""Polling interval for a broadcast that does not signal its end (NCCL's), seconds."""


class Arrival:
    """A broadcast that was started; it holds the tensor until it is over.

    Args:
        tensor: contiguous; sent by rank 0 of the group, written by the other ranks.
        tell: called once, from any thread, when the broadcast ends or fails; at once if nothing signals its end
            (``glance_s``).
    """

    def __init__(self, group: SenderGroup, tensor: Tensor, tell: Callable[[], None]) -> None:
        self.tensor = tensor
        self._work = group.broadcast(tensor)
        self._future: Any = self._work.get_future() if group.says_when_over else None
        if self._future is not None:
            self._future.add_done_callback(lambda _: tell())
        else:
            tell()

    @property
    def is_over(self) -> bool:
        """Whether ``wait`` would return or raise at once."""
        over: bool = self._work.is_completed() if self._future is None else self._future.done()
        return over

    @property
    def glance_s(self) -> float | None:
        """Polling interval for ``is_over``, seconds; None: ``tell`` signals the end."""
        return GLANCE_S if self._future is None else None

    def wait(self) -> None:
        """Block until the broadcast ends; on CUDA, make the current stream wait instead.

        Raises:
            RuntimeError: another end is gone, or did not take part in time.
        """
        self._work.wait()
