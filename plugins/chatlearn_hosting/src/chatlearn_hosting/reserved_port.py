"""Reserves TCP ports on this node until their listener binds.

Another process may take a port that was free a moment ago before torch listens at it. The socket that found the port
therefore stays bound, without listening: the kernel gives a bound port to no other process, but lets a second socket
listen at it if both allow address reuse, as torch's stores do.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType

_ATTEMPTS = 100


class ReservedPort:
    """A port on all addresses of this node, reserved until it is closed.

    Raises:
        OSError: the node has no free port, or the given port is taken.
    """

    def __init__(self, number: int = 0) -> None:
        """Bind the port.

        Args:
            number: port number; 0 takes any free port.
        """
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._socket = socket.socket(family)
        try:
            if number == 0:  # with a given number, this option would allow a port that another process has bound
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
        """Release the port; a listener that has bound it continues. A repeated call does nothing."""
        self._socket.close()

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def reserved_row(count: int) -> Iterator[int]:
    """Reserve ``count`` consecutive ports inside the context, and yield the first.

    Raises:
        OSError: no such row of free ports was found.
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
