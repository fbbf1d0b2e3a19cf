from __future__ import annotations

import threading

from chatlearn_vllm.joint_call import JointCall

PATIENCE_S = 20


def test_the_call_completes_when_all_ranks_have_answered():
    call = JointCall("pause", 3)
    assert call.take(2, None, explains_most=False) == (False, None)
    assert call.missing == [0, 1]
    assert call.take(0, None, explains_most=False) == (False, None)
    assert call.take(1, None, explains_most=False) == (True, None)


def test_the_first_failure_is_kept_unless_a_later_one_explains_more():
    call = JointCall("pause", 4)
    first, second, reason = ValueError("first"), ValueError("second"), ValueError("reason")
    assert call.take(0, first, explains_most=False) == (False, first)
    assert call.take(1, second, explains_most=False) == (False, first)
    assert call.take(2, reason, explains_most=True) == (False, reason)
    assert call.take(3, None, explains_most=False) == (True, reason)


def test_a_sent_call_cannot_be_cancelled():
    assert not JointCall("pause", 2).future.cancel()


def test_only_the_first_wait_limit_counts():
    call, over = JointCall("pause", 2), threading.Event()
    call.limit_wait(0.001, over.set)
    call.limit_wait(0.0, lambda: 1 / 0)
    assert over.wait(PATIENCE_S)


def test_the_wait_limit_is_cancelled_once_all_have_answered():
    call, over = JointCall("pause", 2), threading.Event()
    call.take(0, ValueError("first"), explains_most=False)
    call.limit_wait(0.05, over.set)
    call.take(1, None, explains_most=False)
    call.limit_wait(0.0, over.set)
    assert not over.wait(0.1)
