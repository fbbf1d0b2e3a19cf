"""A thread that transfers messages to and from a hosted process, and collects its printed output."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable

from chatlearn_hosting.engine_side.wire import Decoder, Message, encode

CHUNK_BYTES = 1 << 20
PRINT_CHUNK_BYTES = 1 << 16

log = logging.getLogger(__name__)


class Link:
    """Sends without blocking the caller, and delivers from its own thread."""

    def __init__(
        self,
        name: str,
        connection: socket.socket,
        output: int,
        *,
        on_messages: Callable[[list[Message]], None],
        on_output: Callable[[bytes], None],
        on_end: Callable[[], None],
    ) -> None:
        """Start the thread.

        Args:
            name: name of the thread.
            connection: this end of the socket pair; the link takes ownership.
            output: reading end of the process's output pipe; the link takes ownership.
            on_messages: called with arrived messages.
            on_output: called with printed bytes.
            on_end: called once, when the other end of the connection is closed.
        """
        self._connection = connection
        self._output = output
        self._on_messages = on_messages
        self._on_output = on_output
        self._on_end = on_end
        self._outgoing: deque[bytes] = deque()
        self._stopping = False
        self._wake_read, self._wake_write = socket.socketpair()
        self._connection.setblocking(False)
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        os.set_blocking(output, False)
        self._name = name
        self._thread = threading.Thread(target=self._run, name=f"{name} link", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Queue a message; callable from any thread.

        Raises:
            TypeError: the message contains an object that is not a plain builtin.
        """
        self._outgoing.append(encode(message))
        self._wake()

    def stop(self) -> None:
        """Read the remaining output, end the thread and close both ends. A repeated call does nothing."""
        self._stopping = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the thread is already awake, or has ended
            self._wake_write.send(b"\0")

    def _run(self) -> None:
        try:
            self._move()
        except Exception:
            log.exception("%s: the communication thread failed, so the process can no longer be reached", self._name)
            self._on_end()
        finally:
            for end in (self._connection, self._wake_read, self._wake_write):
                end.close()
            os.close(self._output)

    def _move(self) -> None:
        decoder, sending = Decoder(), memoryview(b"")
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            selector.register(self._output, selectors.EVENT_READ)
            selector.register(self._connection, selectors.EVENT_READ)
            connected = printing = True
            while not self._stopping:
                if connected:
                    wanted = selectors.EVENT_READ
                    if sending or self._outgoing:
                        wanted |= selectors.EVENT_WRITE
                    selector.modify(self._connection, wanted)
                for key, events in selector.select():
                    if key.fileobj is self._wake_read:
                        self._wake_read.recv(4096)
                    elif key.fileobj == self._output:
                        printing = self._read_output()
                        if not printing:
                            selector.unregister(self._output)
                    elif connected:
                        if events & selectors.EVENT_READ:
                            connected = self._receive(decoder)
                        if connected and events & selectors.EVENT_WRITE:
                            sending = self._send(sending)
                        if not connected:
                            selector.unregister(self._connection)
                            self._on_end()
            while printing and self._read_output(once=True):
                pass

    def _receive(self, decoder: Decoder) -> bool:
        """Read messages. Returns False when the other end is closed."""
        try:
            data = self._connection.recv(CHUNK_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        messages = decoder.feed(data)
        if messages:
            self._on_messages(messages)
        return bool(data)

    def _send(self, sending: memoryview) -> memoryview:
        """Send as much as possible. Returns the rest of a partly sent message."""
        try:
            while sending or self._outgoing:
                if not sending:
                    sending = memoryview(self._outgoing.popleft())
                sending = sending[self._connection.send(sending) :]
        except BlockingIOError:
            pass
        except OSError:
            self._outgoing.clear()  # the other end is gone; reading will report it
            return memoryview(b"")
        return sending

    def _read_output(self, *, once: bool = False) -> bool:
        """Read output. Returns False when the pipe is closed; with ``once`` also when there is nothing to read now."""
        try:
            data = os.read(self._output, PRINT_CHUNK_BYTES)
        except BlockingIOError:
            return not once
        if data:
            self._on_output(data)
        return bool(data)
