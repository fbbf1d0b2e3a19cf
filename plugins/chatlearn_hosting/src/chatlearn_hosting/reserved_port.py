"""Reserves TCP ports on this node until their listener binds.

A port that was free a moment ago may be handed to any other process before torch listens at it. So the socket that
found it stays bound, without listening: the kernel gives no other process a bound port, and lets a second socket
listen at it if both allow the reuse of addresses, as torch's stores do.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType

_ATTEMPTS = 100


class ReservedPort:
    """A port of all this node's addresses, held until it is closed.

    Raises:
        OSError: the node has no free port, or somebody has this one.
    """

    def __init__(self, number: int = 0) -> None:
        """Bind it.

        Args:
            number: which; 0 is any that is free.
        """
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._socket = socket.socket(family)
        try:
            if number == 0:  # of a certain port, bound with this option, somebody else might be the holder as well
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self._socket.bind(("", number))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        except OSError:
            self._socket.close()
            raise
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Give the port up; a listener that has bound it goes on. Calling it twice is fine."""
        self._socket.close()

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def reserved_row(count: int) -> Iterator[int]:
    """The first of ``count`` consecutive ports, all held inside the context.

    Raises:
        OSError: the node has none.
    """
    for _ in range(_ATTEMPTS):
        with ExitStack() as held:
            first = held.enter_context(ReservedPort()).number
            try:
                for number in range(first + 1, first + count):
                    held.enter_context(ReservedPort(number))
            except (OSError, OverflowError):
                continue
            yield first
            return
    raise OSError(f"no {count} consecutive ports were free in {_ATTEMPTS} attempts")
