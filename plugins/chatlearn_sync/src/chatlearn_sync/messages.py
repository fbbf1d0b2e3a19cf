"""Control messages between the two ends of a sync: JSON objects, each preceded by its length (4 bytes)."""

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
"""Maximum length of an error text in a message, characters."""


@dataclass(slots=True, frozen=True)
class Address:
    """Where a sender listens, and the secret that both ends prove to know (see ``engine_side.greeting``)."""

    family: Literal["unix", "tcp"]
    host: str
    """``unix``: a name in Linux's abstract name space, which leaves no file. ``tcp``: a host name or address."""
    port: int
    token: str = field(repr=False)


def store_secret(address: Address) -> str | None:
    """Return the secret that guards the rendezvous store of a sender's process group; None for a sender without TCP,
    whose store listens on loopback only.
    """
    return address.token if address.family == "tcp" else None


@dataclass(slots=True, frozen=True)
class ControlOffer:
    """Offer of a sender with a control path: where it listens. Everything else travels over that connection."""

    transport: str
    sender: Endpoint
    address: Address


def encode(message: Message) -> bytes:
    """Encode a message as its length and its JSON text."""
    content = json.dumps(message).encode()
    return LENGTH.pack(len(content)) + content


class Decoder:
    """Splits a byte stream into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Add received bytes; returns the messages that are now complete.

        Raises:
            ValueError: a message is not a JSON object.
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
    """Return an error's type and text as sent to the other end, cut to ``MOST_TEXT`` characters."""
    return f"{type(error).__name__}: {error}"[:MOST_TEXT]


def hello_of(endpoint: Endpoint, **facts: Any) -> Message:
    """Build a receiver's first message, which follows its greeting."""
    return {"receiver": list(key_of(endpoint)), **facts}


def key_of(endpoint: Endpoint) -> tuple[str, int, int]:
    """Return what identifies an end within a plan: (role, replica, rank)."""
    return (endpoint.role, endpoint.replica, endpoint.rank)
