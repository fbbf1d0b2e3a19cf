import pytest

from chatlearn_hosting.engine_side.greeting import ANSWER_BYTES, GREETING_BYTES, MARK, Caller, Doorkeeper


def test_both_sides_know_each_other() -> None:
    caller, door = Caller("secret"), Doorkeeper("secret")
    assert len(caller.greeting) == GREETING_BYTES
    answer = door.answer(caller.greeting)
    assert answer is not None
    assert len(answer) == ANSWER_BYTES
    assert caller.accepts(answer)


def test_the_secret_does_not_travel() -> None:
    assert b"secret" not in Caller("secret").greeting


def test_a_greeting_counts_once() -> None:
    caller, door = Caller("secret"), Doorkeeper("secret")
    assert door.answer(caller.greeting) is not None
    assert door.answer(caller.greeting) is None


def test_another_secret_is_refused_on_both_sides() -> None:
    caller = Caller("secret")
    assert Doorkeeper("other").answer(caller.greeting) is None
    other = Doorkeeper("other").answer(Caller("other").greeting)
    assert other is not None
    assert not caller.accepts(other)
    assert not caller.accepts(caller.greeting[-ANSWER_BYTES:]), "the caller's own proof sent back"


@pytest.mark.parametrize("change", [b"", b"x" * 3, bytes(GREETING_BYTES), b"\xff" * GREETING_BYTES, MARK * 4])
def test_anything_else_is_no_greeting(change) -> None:
    assert Doorkeeper("secret").answer(change) is None


def test_every_changed_byte_is_noticed() -> None:
    caller, door = Caller("secret"), Doorkeeper("secret")
    for place in range(GREETING_BYTES):
        changed = bytearray(caller.greeting)
        changed[place] ^= 1
        assert door.answer(bytes(changed)) is None


def test_an_impossible_greeting_is_detected_early() -> None:
    door = Doorkeeper("secret")
    assert door.may_become_greeting(b"")
    assert door.may_become_greeting(MARK[:3])
    assert door.may_become_greeting(MARK + b"anything")
    assert not door.may_become_greeting(b"GET /")
    assert not door.may_become_greeting(MARK + bytes(GREETING_BYTES))
