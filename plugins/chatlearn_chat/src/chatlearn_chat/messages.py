"""Checks chat messages in data, and extracts their text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from chatlearn_core.data.format import Message
from chatlearn_core.exceptions import DataError


def checked_prompt(prompt: str | Sequence[Message]) -> tuple[Mapping[str, Any], ...]:
    """Return the messages of a prompt; a plain text becomes one user message.

    Raises:
        DataError: the prompt is malformed or empty, or leaves nothing to generate; has only the reason.
    """
    if isinstance(prompt, str):
        return ({"role": "user", "content": prompt},)
    messages = _well_formed(prompt, "prompt")
    last = messages[-1]
    if last["role"] == "assistant":
        raise DataError("the prompt's last message is the assistant's, so there is nothing to generate")
    if last["role"] != "tool" and not text_of(last).strip():  # a tool may return nothing
        raise DataError(f"the prompt's last message ({last['role']}) is empty")
    return messages


def checked_completion(completion: str | Sequence[Message]) -> tuple[Mapping[str, Any], ...]:
    """Return the messages of a completion; a plain text becomes one assistant message.

    Raises:
        DataError: the completion is malformed, or a turn of the assistant is empty; has only the reason.
    """
    if isinstance(completion, str):
        messages: tuple[Mapping[str, Any], ...] = ({"role": "assistant", "content": completion},)
    else:
        messages = _well_formed(completion, "completion")
    for message in messages:
        if message["role"] == "assistant" and not message.get("tool_calls") and not text_of(message).strip():
            raise DataError("the completion is empty")
    return messages


def _well_formed(messages: Sequence[Message], what: str) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(messages, Sequence) or not messages:
        raise DataError(f"the {what} must be a string or a non-empty list of messages, not {messages!r:.60}")
    formed: list[Mapping[str, Any]] = []
    for index, message in enumerate(messages):
        if isinstance(message, Mapping) and message.get("role") == "assistant" and message.get("tool_calls"):
            message = {"content": None, **message}  # a turn with tool calls may have no content
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(f"message {index} of the {what} must have 'role' and 'content', not {message!r:.60}")
        formed.append(dict(message))
    return tuple(formed)


def single_text(completion: str | Sequence[Message], several_turns: bool) -> str:
    """Return the text of a completion without a chat template.

    Args:
        completion: text, or messages.
        several_turns: whether turns other than the completion are imitated too.

    Raises:
        DataError: it is not a single turn of the assistant; has only the reason.
    """
    if isinstance(completion, str) and not several_turns:
        return completion
    messages = checked_completion(completion)
    if several_turns or len(messages) > 1 or messages[0]["role"] != "assistant":
        raise DataError(
            "several turns can be imitated only with a chat template that marks them; set"
            " data.apply_chat_template=true "
            "and use a model with a template, or imitate only the last turn (options.turns=last of format 'messages')"
        )
    return text_of(messages[0])


def has_assistant(prompt: str | Sequence[Message]) -> bool:
    """Whether a prompt contains a message of the assistant."""
    return not isinstance(prompt, str) and any(message.get("role") == "assistant" for message in prompt)


def text_of(message: Message) -> str:
    """Return the text of a message; content may be a string or a list of parts, of which only the text parts count."""
    content = message["content"]
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    raise DataError(f"the content of a {message['role']} message must be text or a list of parts, not {content!r:.60}")
