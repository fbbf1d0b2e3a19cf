"""The messages behind a prompt of a run."""

from __future__ import annotations

from chatlearn_core.data.format import Message
from chatlearn_core.protocols.prompt_renderer import PromptRenderer
from chatlearn_core.types import Prompt

_STAND_IN = "\U0010fffd"


def messages_of(prompt: Prompt, renderer: PromptRenderer) -> tuple[Message, ...] | None:
    """The messages of a row; of a row with a plain text, one of the user with the text that the chat template rendered.
    None if the template alone did not render it (``data.apply_chat_template`` is off).
    """
    if prompt.messages:
        return prompt.messages
    before, _, after = renderer.prompt(_STAND_IN).text.partition(_STAND_IN)
    text = prompt.text
    if len(text) < len(before) + len(after) or not text.startswith(before) or not text.endswith(after):
        return None
    return ({"role": "user", "content": text[len(before) : len(text) - len(after)]},)
