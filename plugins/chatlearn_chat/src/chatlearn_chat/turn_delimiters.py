"""Finds the added tokens by which a chat template begins and ends turns.

Many tokenizers mark only some of these tokens as special: DeepSeek's ``<｜User｜>`` is an added token like ``<think>``.
They differ in where the template writes them, so this module renders conversations with placeholder contents and
searches the text around the contents.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

from chatlearn_core.data.format import Message
from chatlearn_core.exceptions import DataError

Render = Callable[[Sequence[Message], bool], str]
"""Renders messages, with or without the generation prompt."""

_CONTENTS = ("\U0010fff0", "\U0010fff1", "\U0010fff2")
"""Private-use characters, one for the content of each message."""


def turn_delimiters(added_tokens: Collection[str], render: Render) -> frozenset[str]:
    """Return the added tokens at the beginning or end of a turn.

    Before a user's turn these are all tokens. At the beginning of a turn of the assistant or a tool it is only the
    first: ``<think>`` or ``<tool_response>`` may follow, which belong to the turn's content.
    """
    delimiters = [token for token in added_tokens if _could_delimit(token)]
    pattern = re.compile("|".join(map(re.escape, sorted(delimiters, key=len, reverse=True))) or r"(?!)")

    def around(*roles: str, generation_prompt: bool = False) -> list[str]:
        """Return the template's text before, between and after the contents; empty if it refuses those roles."""
        messages = [{"role": role, "content": content} for role, content in zip(roles, _CONTENTS, strict=False)]
        try:
            text = render(messages, generation_prompt)
        except DataError:
            return []
        pieces = re.split("|".join(_CONTENTS[: len(roles)]), text)
        return pieces if len(pieces) == len(roles) + 1 else []

    def first(text: str) -> list[str]:
        found = pattern.match(text.lstrip())
        return [] if found is None else [found[0]]

    found = _leading(pattern, (around("user") or [""])[0])
    if pieces := around("user", "assistant", "user"):
        found += pattern.findall(pieces[2])
    if pieces := around("system", "user"):
        # Take the first token that does not begin every text: some templates render a system turn like the assistant's.
        found += [token for token in _leading(pattern, pieces[0]) if token not in found][:1]
        found += pattern.findall(pieces[1])
    user_end = (around("user") or [""])[-1]
    assistant_end = (around("user", "assistant") or [""])[-1]
    found += first(user_end) + first(assistant_end)
    if pieces := around("user", "assistant", "tool"):
        found += first(pieces[2].removeprefix(assistant_end))
    ends = set(pattern.findall(user_end))
    if not ends or ends & set(
        pattern.findall(assistant_end)
    ):  # otherwise the user's end token begins the assistant's turn
        for pieces in (around("user", generation_prompt=True), around("user", "assistant")):
            if pieces:
                found += first(pieces[1].removeprefix(user_end))
    return frozenset(found)


def _could_delimit(token: str) -> bool:
    """Whether a token is more than a word, a number or a punctuation mark, which contents have on every line."""
    return any(map(str.isalpha, token)) and any(not (one.isalnum() or one.isspace()) for one in token)


def _leading(pattern: re.Pattern[str], text: str) -> list[str]:
    """Return the tokens at the beginning of ``text``, before its first word."""
    found: list[str] = []
    while match := pattern.match(text := text.lstrip()):
        found.append(match[0])
        text = text[match.end() :]
    return found
