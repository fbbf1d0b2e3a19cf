"""Finds the assistant's turns in a conversation that a chat template has rendered.

A template is a program: it may trim contents, drop the reasoning of earlier turns, and end the last turn differently
from earlier ones. This module therefore assumes nothing about it: it also renders shorter conversations and compares
them with the beginning of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chatlearn_chat.control_tokens import ControlTokens
from chatlearn_core.data.format import Message
from chatlearn_core.exceptions import DataError

Render = Callable[[Sequence[Message], bool], str]
"""Renders messages, with or without the generation prompt."""

_STAND_IN = "\U0010fffd"
"""Private-use character that replaces the content of a message while its position is searched."""


@dataclass(slots=True, frozen=True)
class MarkedConversation:
    """A rendered conversation up to the end of its last turn."""

    text: str
    turns: tuple[tuple[int, int], ...]
    """[start, stop) in ``text`` of the turns to imitate, in order: from the end of the generation prompt to the control
    token that ends the turn, inclusive. Later text of the template (a line break) belongs to no turn, because sampling
    stops before it."""
    is_ended: bool
    """Whether a control token ends the last turn; otherwise the end-of-sequence token must be added."""


def marked_conversation(
    messages: Sequence[Message], imitated: Sequence[int], render: Render, control: ControlTokens
) -> MarkedConversation:
    """Render a conversation and find the turns of the messages ``imitated``, which include the last message.

    Raises:
        DataError: a turn cannot be located in the rendered text; says which turn, and what to do.
    """
    assert imitated[-1] == len(messages) - 1, "the last message must be imitated"
    whole = render(messages, False)
    turns: list[tuple[int, int]] = []
    is_ended = False
    for index in imitated:
        prompt = render(messages[:index], True)
        is_last = index == len(messages) - 1
        if not whole.startswith(prompt):
            if is_last and len(imitated) == 1:
                return _without_common_beginning(messages, whole, prompt, control)
            raise _unclear(index, "begins it differently in a longer conversation than in generation")
        alone = whole if is_last else render(messages[: index + 1], False)
        if not alone.startswith(prompt):
            raise _unclear(index, "writes it differently when it is the last one")
        turn = alone[len(prompt) :].rstrip()
        end = control.last_at_end_of(turn)
        is_ended = end is not None
        if is_last or whole.startswith(alone):
            stop = len(prompt) + len(turn)
        else:
            stop = _end_before_next(messages, index, whole, len(prompt), end, render)
        turns.append((len(prompt), stop))
    return MarkedConversation(whole[: turns[-1][1]], tuple(turns), is_ended)


def _without_common_beginning(
    messages: Sequence[Message], whole: str, prompt: str, control: ControlTokens
) -> MarkedConversation:
    """Join the generation prompt with the content and its end, as they are in the finished conversation.

    Needed if the generation prompt begins the turn in a way that the finished conversation lacks (an opened thought).
    """
    content = messages[-1]["content"]
    place = whole.rfind(content.strip()) if isinstance(content, str) and content.strip() else -1
    if place < 0 or messages[-1].get("tool_calls"):
        raise _unclear(len(messages) - 1, "does not contain its content")
    turn = whole[place:].rstrip()
    end = control.last_at_end_of(turn)
    return MarkedConversation(prompt + turn, ((len(prompt), len(prompt) + len(turn)),), end is not None)


def _end_before_next(
    messages: Sequence[Message], index: int, whole: str, start: int, end: str | None, render: Render
) -> int:
    """Find the end of a turn that the template writes differently when other turns follow.

    It is the control token that ends the turn, which must come before the next message's content.
    """
    place = -1 if end is None else whole.find(end, start)
    if end is None or place < 0:
        raise _unclear(index, "ends it differently when others follow")
    following: Message = {**messages[index + 1], "content": _STAND_IN}
    marked = render([*messages[: index + 1], following, *messages[index + 2 :]], False)
    stop = place + len(end)
    if marked[:stop] != whole[:stop] or _STAND_IN not in marked[stop:]:
        raise _unclear(index, "does not end it before the next message")
    return stop


def _unclear(index: int, what: str) -> DataError:
    return DataError(
        f"the assistant's turn in message {index} cannot be located: the chat template {what}. Imitate only the last "
        "turn (options.turns: last of the format 'messages'), or use a template that keeps turns unchanged"
    )
