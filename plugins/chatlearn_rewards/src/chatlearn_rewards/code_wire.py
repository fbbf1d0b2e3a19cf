"""The messages between the tests and the program, each in its own sandbox: plain values, and handles of other objects.

Both ends run this file inside a sandbox; standard library only. Nothing is unpickled: what a program sends becomes
numbers, strings, bytes and containers of these, or a handle, whatever classes it pretends to have.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from typing import Any

LENGTH = struct.Struct("!I")
MAX_FRAME_BYTES = 16 << 20
SMALL = 1 << 62
"""Larger integers travel as hexadecimal text: Python refuses to print long ones as decimals."""


class LinkClosedError(Exception):
    """The other end closed the connection, or sent an invalid message."""


class UnsupportedValueError(Exception):
    """A test passes a value that cannot be sent."""


class Link:
    """Messages over one descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def send(self, message: Any) -> None:
        """Send a JSON value."""
        body = json.dumps(message).encode()
        if len(body) > MAX_FRAME_BYTES:
            raise ValueError(f"a value of {len(body)} bytes; the limit is {MAX_FRAME_BYTES}")
        left = memoryview(LENGTH.pack(len(body)) + body)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            raise LinkClosedError(str(error)) from error

    def receive(self) -> Any:
        """Wait for the next message and return it."""
        size = LENGTH.unpack(self._read(LENGTH.size))[0]
        if size > MAX_FRAME_BYTES:
            raise LinkClosedError("no message: too long")
        try:
            return json.loads(self._read(size))
        except (ValueError, RecursionError) as error:
            raise LinkClosedError("no message: not JSON") from error

    def _read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            try:
                data = os.read(self._descriptor, size - len(parts))
            except OSError as error:
                raise LinkClosedError(str(error)) from error
            if not data:
                raise LinkClosedError("the other end is gone")
            parts += data
        return bytes(parts)


def encode(value: Any, keep: Callable[[Any], Any]) -> Any:
    """Encode any value as JSON; ``keep`` encodes values that are not plain. Subclasses of plain types become plain."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, int):
        number = int.__index__(value)
        return number if -SMALL < number < SMALL else ["int", hex(number)]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (bytes, bytearray)):
        return ["bytes" if isinstance(value, bytes) else "bytearray", bytes(value).hex()]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, dict):
        return ["dict", [[encode(key, keep), encode(dict.__getitem__(value, key), keep)] for key in dict.keys(value)]]
    if isinstance(value, list):
        return ["list", [encode(item, keep) for item in list.__iter__(value)]]
    if isinstance(value, tuple):
        return ["tuple", [encode(item, keep) for item in tuple.__iter__(value)]]
    if isinstance(value, set):
        return ["set", [encode(item, keep) for item in set.__iter__(value)]]
    if isinstance(value, frozenset):
        return ["frozenset", [encode(item, keep) for item in frozenset.__iter__(value)]]
    return keep(value)


def decode(data: Any, handle: Callable[[list[Any]], Any]) -> Any:
    """Decode the result of ``encode``; ``handle`` decodes the results of ``keep``.

    Raises:
        LinkClosedError: ``encode`` cannot have produced the data.
    """
    if not isinstance(data, list):
        return data
    try:
        kind, *rest = data
        if kind in ("list", "tuple", "set", "frozenset"):
            items = [decode(item, handle) for item in rest[0]]
            return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](items)
        if kind == "dict":
            return {decode(key, handle): decode(value, handle) for key, value in rest[0]}
        if kind == "int":
            return int(rest[0], 16)
        if kind in ("bytes", "bytearray"):
            return (bytes if kind == "bytes" else bytearray).fromhex(rest[0])
        if kind == "complex":
            return complex(rest[0], rest[1])
        return handle(data)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise LinkClosedError(f"no value: {error}") from error
