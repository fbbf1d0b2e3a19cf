from __future__ import annotations

import pickle

import pytest

from chatlearn_hosting.engine_side.wire import LENGTH, Decoder, encode


@pytest.mark.parametrize("chunk", [1, 3, 8, 1000])
def test_messages_survive_any_cut(chunk: int) -> None:
    messages = [("call", 0, "echo", (), {}), ("event", 1, [1, 2.5, "x", b"\0" * 50]), ("stop",)]
    stream = b"".join(map(encode, messages))
    decoder = Decoder()
    found = [m for start in range(0, len(stream), chunk) for m in decoder.feed(stream[start : start + chunk])]
    assert found == messages


class Sneaky:
    def __reduce__(self):
        return (print, ("executed",))


def test_nothing_that_could_run_code_is_written_or_read() -> None:
    with pytest.raises(TypeError, match="Sneaky cannot be sent"):
        encode(("event", Sneaky()))
    content = pickle.dumps(("event", Sneaky()))
    with pytest.raises(pickle.UnpicklingError, match=r"builtins\.print; only plain builtins are allowed"):
        Decoder().feed(LENGTH.pack(len(content)) + content)
