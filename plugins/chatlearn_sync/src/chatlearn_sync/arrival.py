"""One broadcast on its way, which says when it is over: looking for that again and again would take as long as a
bucket does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from chatlearn_hosting.engine_side.groups import SenderGroup

GLANCE_S = 0.0005
"""How often to look at a broadcast that does not say when it is over (NCCL's)."""


class Arrival:
    """A broadcast that was started; it holds the tensor until it is over.

    Args:
        tensor: contiguous; what rank 0 of the group sends, or where the others receive it.
        tell: called once, from any thread, when it is over, well or not; or at once, where nobody knows (``glance_s``).
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
        """Whether ``wait`` returns, or raises, at once."""
        over: bool = self._work.is_completed() if self._future is None else self._future.done()
        return over

    @property
    def glance_s(self) -> float | None:
        """How often to look at ``is_over``; None: when ``tell`` was called is enough."""
        return GLANCE_S if self._future is None else None

    def wait(self) -> None:
        """Block until it is over; on CUDA, let the current stream wait.

        Raises:
            RuntimeError: another end has gone, or did not take part in time.
        """
        self._work.wait()
