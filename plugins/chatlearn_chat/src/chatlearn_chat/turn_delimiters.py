"""Which added tokens a chat template begins and ends turns with.

Many tokenizers mark only some of those tokens as special: DeepSeek's ``<｜User｜>`` is an added token like ``<think>``.
What tells them apart is where the template writes them, so conversations of stand-in contents are rendered and the text
around the contents is searched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

from chatlearn_core.data.format import Message
from chatlearn_core.exceptions import DataError

Render = Callable[[Sequence[Message], bool], str]
"""Messages, and whether the generation prompt follows -> text."""

_CONTENTS = ("\U0010fff0", "\U0010fff1", "\U0010fff2")
"""Characters without a meaning, one for the content of each message."""


def turn_delimiters(added_tokens: Collection[str], render: Render) -> frozenset[str]:
    """The added tokens that stand where a turn begins or ends.

    Before a user's turn that is every token. Where a turn of the assistant or a tool begins it is the first one alone:
    ``<think>`` or ``<tool_response>`` may follow, which belong to what the turn says.
    """
    delimiters = [token for token in added_tokens if _could_delimit(token)]
    pattern = re.compile("|".join(map(re.escape, sorted(delimiters, key=len, reverse=True))) or r"(?!)")

    def around(*roles: str, generation_prompt: bool = False) -> list[str]:
        """What the template writes before, between and after the contents; empty if it refuses those roles."""
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
        # The first token that does not begin every text: some templates take a system's turn for the assistant's.
        found += [token for token in _leading(pattern, pieces[0]) if token not in found][:1]
        found += pattern.findall(pieces[1])
    user_end = (around("user") or [""])[-1]
    assistant_end = (around("user", "assistant") or [""])[-1]
    found += first(user_end) + first(assistant_end)
    if pieces := around("user", "assistant", "tool"):
        found += first(pieces[2].removeprefix(assistant_end))
    ends = set(pattern.findall(user_end))
    if not ends or ends & set(pattern.findall(assistant_end)):  # otherwise the user's end begins the assistant's turn
        for pieces in (around("user", generation_prompt=True), around("user", "assistant")):
            if pieces:
                found += first(pieces[1].removeprefix(user_end))
    return frozenset(found)


def _could_delimit(token: str) -> bool:
    """Whether a token is more than a word, a number or a mark, which contents have on every line."""
    return any(map(str.isalpha, token)) and any(not (one.isalnum() or one.isspace()) for one in token)


def _leading(pattern: re.Pattern[str], text: str) -> list[str]:
    """The tokens that ``text`` begins with, before its first word."""
    found: list[str] = []
    while match := pattern.match(text := text.lstrip()):
        found.append(match[0])
        text = text[match.end() :]
    return found
