"""How messages look between a process and the one it hosts: a length, then a pickle of plain builtins.

Both ends may be of different Python versions and have nothing but the standard library in common, so a message holds
None, bool, int, float, str, bytes, bytearray, list, tuple, dict, set and frozenset, and nothing else; either end
refuses what is not. Pickle protocol 5 is understood by Python 3.8 and later.
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
            f"{kind.__module__}.{kind.__qualname__} cannot travel to or from a hosted process; plain builtins only"
        )


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"a message holds {module}.{name}; plain builtins only")


def encode(message: Message) -> bytes:
    """One message as bytes.

    Raises:
        TypeError: it holds something that is no plain builtin.
    """
    content = io.BytesIO()
    content.write(bytes(LENGTH.size))
    _PlainPickler(content, PROTOCOL).dump(message)
    content.seek(0)
    content.write(LENGTH.pack(content.getbuffer().nbytes - LENGTH.size))
    return content.getvalue()


class Decoder:
    """Puts messages together from bytes as they arrive."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are complete now.

        Raises:
            pickle.UnpicklingError: one holds something that is no plain builtin.
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
