from __future__ import annotations

import threading

from chatlearn_vllm.joint_call import JointCall

PATIENCE_S = 20


def test_it_is_over_when_all_have_answered():
    call = JointCall("pause", 3)
    assert call.take(2, None, explains_most=False) == (False, None)
    assert call.missing == [0, 1]
    assert call.take(0, None, explains_most=False) == (False, None)
    assert call.take(1, None, explains_most=False) == (True, None)


def test_the_first_failure_counts_but_for_one_that_explains_more():
    call = JointCall("pause", 4)
    first, second, reason = ValueError("first"), ValueError("second"), ValueError("reason")
    assert call.take(0, first, explains_most=False) == (False, first)
    assert call.take(1, second, explains_most=False) == (False, first)
    assert call.take(2, reason, explains_most=True) == (False, reason)
    assert call.take(3, None, explains_most=False) == (True, reason)


def test_whoever_was_told_cannot_be_told_otherwise():
    assert not JointCall("pause", 2).future.cancel()


def test_patience_ends_once():
    call, over = JointCall("pause", 2), threading.Event()
    call.be_patient(0.001, over.set)
    call.be_patient(0.0, lambda: 1 / 0)
    assert over.wait(PATIENCE_S)


def test_patience_is_not_needed_once_all_have_answered():
    call, over = JointCall("pause", 2), threading.Event()
    call.take(0, ValueError("first"), explains_most=False)
    call.be_patient(0.05, over.set)
    call.take(1, None, explains_most=False)
    call.be_patient(0.0, over.set)
    assert not over.wait(0.1)
