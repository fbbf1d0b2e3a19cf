"""Finds what a chat template writes after an assistant's turn that a policy has sampled.

The sampled tokens stay as they are; only the text behind them, up to the next generation prompt, is rendered and
encoded.
"""

from __future__ import annotations

from collections.abc import Sequence

from chatlearn_chat.conversation import Render
from chatlearn_core.data.format import Message
from chatlearn_core.exceptions import DataError

_STAND_IN = "\U0010fffc"
"""Private-use character that replaces the content of the next message while its position is searched."""


def text_after_turn(
    messages: Sequence[Message],
    index: int,
    render: Render,
    *,
    generation_prompt: str,
    sampled_end: str | None,
    end_of_turn: str | None,
) -> str:
    """Return the rendered text behind the turn of message ``index``, with the generation prompt for the next turn.

    The text begins behind the token that ends the turn, if the policy has sampled one, and otherwise with that token.

    Args:
        messages: the whole conversation; others follow message ``index``.
        index: position of the assistant's message.
        render: renders messages, with or without the generation prompt.
        generation_prompt: the text with which the template begins a turn of the assistant; may be empty.
        sampled_end: control token that the policy sampled last; None if it sampled none (a limit or a stop string).
        end_of_turn: control token by which the template ends the assistant's turns; None if it has none.

    Raises:
        DataError: the end of the turn cannot be located in the rendered text.
    """
    whole = render(messages, True)
    following: Message = {**messages[index + 1], "content": _STAND_IN}
    head, found, _ = render([*messages[: index + 1], following, *messages[index + 2 :]], True).partition(_STAND_IN)
    if found and whole.startswith(head):
        begin = head.rfind(generation_prompt.strip()) if generation_prompt.strip() else -1
        for token in (sampled_end, end_of_turn):
            place = -1 if token is None else head.rfind(token, begin + len(generation_prompt.strip()))
            if token is not None and place >= 0:
                return whole[place if sampled_end is None else place + len(token) :]
    alone = render(messages[: index + 1], False)  # a template without tokens that end turns
    if whole.startswith(alone):
        return whole[len(alone) :]
    raise DataError(
        f"the end of the assistant's turn in message {index} cannot be located: the chat template writes earlier turns "
        "differently when others follow; use a template that keeps turns unchanged"
    )
