"""Small messages between the two ends of a sync, beside the bytes: JSON objects behind their length."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from typing import Any, Literal

from chatlearn_core.types import Endpoint

Message = dict[str, Any]
LENGTH = struct.Struct("<I")
READ_BYTES = 1 << 16
MOST_TEXT = 20_000
"""Characters of an error's words that travel."""


@dataclass(slots=True, frozen=True)
class Address:
    """Where a sender listens, and the secret of both ends (``chatlearn_hosting.engine_side.greeting``)."""

    family: Literal["unix", "tcp"]
    host: str
    """``unix``: a name in Linux's abstract name space, which leaves no file. ``tcp``: a host name or address."""
    port: int
    token: str = field(repr=False)


def store_secret(address: Address) -> str | None:
    """What guards the store of a sender's process group: nothing where it is on loopback."""
    return address.token if address.family == "tcp" else None


@dataclass(slots=True, frozen=True)
class ControlOffer:
    """What a sender with a control path offers: where it listens. All else is said there."""

    transport: str
    sender: Endpoint
    address: Address


def encode(message: Message) -> bytes:
    """One message as bytes."""
    content = json.dumps(message).encode()
    return LENGTH.pack(len(content)) + content


class Decoder:
    """Puts messages together from bytes as they arrive."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are complete now.

        Raises:
            ValueError: one is no JSON object.
        """
        self._bytes += data
        messages: list[Message] = []
        while len(self._bytes) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._bytes)
            if len(self._bytes) < LENGTH.size + length:
                break
            messages.append(_parsed(self._bytes[LENGTH.size : LENGTH.size + length]))
            del self._bytes[: LENGTH.size + length]
        return messages


def _parsed(content: bytes | bytearray) -> Message:
    try:
        message = json.loads(content)
    except RecursionError as error:
        raise ValueError("a message of the control path is nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError(f"a message of the control path is a {type(message).__name__}, not an object")
    return message


def error_text(error: BaseException) -> str:
    """An error as it is sent to the other end."""
    return f"{type(error).__name__}: {error}"[:MOST_TEXT]


def hello_of(endpoint: Endpoint, **facts: Any) -> Message:
    """The first message of a receiver, after its greeting."""
    return {"receiver": list(key_of(endpoint)), **facts}


def key_of(endpoint: Endpoint) -> tuple[str, int, int]:
    """What tells the ends of one plan apart."""
    return (endpoint.role, endpoint.replica, endpoint.rank)
