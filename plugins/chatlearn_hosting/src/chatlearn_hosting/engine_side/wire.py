"""The message format between a process and its hosted process: a length, then a pickle of plain builtins.

The two ends may run different Python versions and share only the standard library. A message therefore contains only
None, bool, int, float, str, bytes, bytearray, list, tuple, dict, set and frozenset; both ends refuse anything else.
Python 3.8 and later read pickle protocol 5. Example: ``("call", 7, "generate", ([1, 2],), {}, False)``.
"""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any, NoReturn

PROTOCOL = 5
LENGTH = struct.Struct("<Q")
Message = tuple[Any, ...]


class _PlainPickler(pickle.Pickler):
    def reducer_override(self, value: object) -> NoReturn:
        kind = type(value)
        raise TypeError(
            f"{kind.__module__}.{kind.__qualname__} cannot be sent to or from a hosted process; use plain builtins"
        )


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"a message contains {module}.{name}; only plain builtins are allowed")


def encode(message: Message) -> bytes:
    """Encode one message.

    Raises:
        TypeError: the message contains an object that is not a plain builtin.
    """
    content = io.BytesIO()
    content.write(bytes(LENGTH.size))
    _PlainPickler(content, PROTOCOL).dump(message)
    content.seek(0)
    content.write(LENGTH.pack(content.getbuffer().nbytes - LENGTH.size))
    return content.getvalue()


class Decoder:
    """Assembles messages from arriving bytes."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that are now complete.

        Raises:
            pickle.UnpicklingError: a message contains an object that is not a plain builtin.
        """
        self._bytes += data
        messages: list[Message] = []
        start = 0
        while len(self._bytes) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._bytes, start)
            stop = start + LENGTH.size + length
            if stop > len(self._bytes):
                break
            with memoryview(self._bytes)[start + LENGTH.size : stop] as content:
                messages.append(_PlainUnpickler(io.BytesIO(content)).load())
            start = stop
        del self._bytes[:start]
        return messages
