"""Messages over a socket pair between the driver and a worker: a length, and a pickle of that length."""

from __future__ import annotations

import asyncio
import pickle
import struct
from typing import Any

_LENGTH = struct.Struct("!Q")
BUFFER_BYTES = 1 << 26
"""What a reader takes in before it lets the sender wait."""


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """Read the next message.

    Raises:
        asyncio.IncompleteReadError: the other end is closed.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


def write_frame(writer: asyncio.StreamWriter, message: Any) -> None:
    """Send a message, or raise before anything is sent if it cannot be pickled."""
    content = pickle.dumps(message)
    writer.write(_LENGTH.pack(len(content)) + content)
