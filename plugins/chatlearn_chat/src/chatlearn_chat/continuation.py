"""Finds what a chat template writes after an assistant's turn that a policy has sampled.

The sampled tokens stay as they are; only the text behind them, up to the next generation prompt, is rendered and
encoded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from chatlearn_chat.conversation import Render
from chatlearn_core.data.format import Message
from chatlearn_core.exceptions import DataError

_STAND_IN = "\U0010fffc"
"""Private-use character that replaces the content of the next message while its position is searched."""
_OTHER_STAND_IN = "\U0010fffb"
"""The same for the content of the turn."""


def text_after_turn(
    messages: Sequence[Message],
    index: int,
    render: Render,
    *,
    generation_prompt: str,
    sampled_end: str | None,
    ends_of_turns: Sequence[str],
) -> str:
    """Return the rendered text behind the turn of message ``index``, with the generation prompt for the next turn.

    The text begins behind the token that ends the turn, if the policy has sampled one, and otherwise with that token.

    Args:
        messages: the whole conversation; others follow message ``index``.
        index: position of the assistant's message.
        render: renders messages, with or without the generation prompt.
        generation_prompt: the text with which the template begins a turn of the assistant; may be empty.
        sampled_end: control token that the policy sampled last; None if it sampled none (a limit or a stop string).
        ends_of_turns: control tokens by which the template ends the assistant's turns: a last one, and earlier ones if
            it ends these differently. Empty if it has none.

    Raises:
        DataError: the end of the turn cannot be located in the rendered text.
    """
    whole = render(messages, True)
    following: Message = {**messages[index + 1], "content": _STAND_IN}
    head, found, _ = render([*messages[: index + 1], following, *messages[index + 2 :]], True).partition(_STAND_IN)
    if found and whole.startswith(head):
        begin = _beginning(head, generation_prompt.strip(), lambda: render(messages[:index], True))
        for token in (sampled_end, *ends_of_turns):
            place = -1 if token is None else head.rfind(token, begin)
            if token is not None and place >= 0:
                return whole[place if sampled_end is None else place + len(token) :]
    alone = render(messages[: index + 1], False)  # a template without tokens that end turns
    if whole.startswith(alone):
        return whole[len(alone) :]
    if found and whole.startswith(head) and not messages[index].get("tool_calls"):  # and which changes earlier turns
        turn: Message = {**messages[index], "content": _OTHER_STAND_IN}
        shown = render([*messages[:index], turn, following, *messages[index + 2 :]], True)
        _, written, behind = shown.partition(_STAND_IN)[0].partition(_OTHER_STAND_IN)
        if written:
            return behind + whole[len(head) :]
    raise DataError(
        f"the end of the assistant's turn in message {index} cannot be located: the chat template writes earlier turns "
        "differently when others follow; use a template that keeps turns unchanged"
    )


def _beginning(head: str, generation_prompt: str, prompt: Callable[[], str]) -> int:
    """Where the turn begins, or a place before it, if the template writes earlier turns otherwise than it prompts."""
    place = head.rfind(generation_prompt) if generation_prompt else -1
    if place >= 0:
        return place + len(generation_prompt)
    return len(os.path.commonprefix([head, prompt()]))  # noqa: RUF071  # by characters, as it is meant
