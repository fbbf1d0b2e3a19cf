"""What is a well-formed conversation."""

from __future__ import annotations

import pytest

from chatlearn_chat.messages import checked_completion, checked_prompt
from chatlearn_core.exceptions import DataError

CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}]}
ASKED = {"role": "user", "content": "1 + 1?"}


def test_a_turn_that_only_calls_tools_needs_no_content():
    (turn,) = checked_completion([CALL])
    assert turn["content"] is None
    assert turn["tool_calls"] == CALL["tool_calls"]


def test_a_tool_may_return_nothing():
    messages = checked_prompt([ASKED, CALL, {"role": "tool", "content": ""}])
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]


@pytest.mark.parametrize(
    "messages",
    [[{"role": "user"}], [ASKED, {"role": "assistant"}, ASKED], [{"role": "user", "content": " "}], [ASKED, "x"]],
)
def test_other_messages_need_their_content(messages):
    with pytest.raises(DataError):
        checked_prompt(messages)
