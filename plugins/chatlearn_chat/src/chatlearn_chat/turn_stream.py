"""Reads a turn while it is sampled: the text that no later token changes."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from chatlearn_chat.tool_calls import THOUGHT_END

REPLACEMENT = "\ufffd"
"""What a decoder writes for an incomplete character."""
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""A token that is one byte. A decoder takes such tokens in a row together: one that is invalid changes those before."""


class TurnStream:
    """The text of one turn, as far as it is certain.

    ``sent`` is at any time a beginning of the content that ``TurnReader.read`` gives of the whole turn, unless the
    request is repeated and other tokens are sampled. Held back are incomplete characters, tokens that may end the turn,
    and whatever may become a stop string or a tool call, from there to the end.

    Args:
        tokenizer: Hugging Face's or one with its interface.
        ends: tokens that may end the turn and are then no text.
        stops: stop strings.
        calls: the markers of tool calls, and whether a turn that begins like a JSON object may be a call; None if calls
            are not read.
        skips_special: whether special tokens are no text.
    """

    def __init__(
        self,
        tokenizer: Any,
        ends: Collection[int | None],
        stops: Sequence[str],
        calls: tuple[Sequence[str], bool] | None,
        *,
        skips_special: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._ends = ends
        self._may_begin = (*stops, *(calls[0] if calls is not None else ()))
        self._calls = calls
        self._skips_special = skips_special
        self._ids: list[int] = []
        self._text = ""
        self._window = (0, 0)
        """The text of ``_ids[:stop]`` is in ``_text``; ``start`` is where its last part begins, which is decoded again
        with the tokens behind it, because decoders treat the first token differently."""
        self._is_whole = True
        self.sent = ""
        """What ``told`` returned so far."""

    def told(self, start: int, token_ids: Sequence[int]) -> str:
        """The further text that is certain now.

        Args:
            start: position of the first token in the turn. A request that is repeated begins again.
            token_ids: the tokens from there on.
        """
        self._is_whole = self._is_whole and start <= len(self._ids)
        if not self._is_whole:
            return ""
        known = self._ids[start : start + len(token_ids)]
        if list(token_ids[: len(known)]) != known:
            self._ids, self._text, self._window = self._ids[:start], "", (0, 0)
            known = []
        self._ids += token_ids[len(known) :]
        self._decode()
        certain = self._certain()
        if len(certain) <= len(self.sent) or not certain.startswith(self.sent):
            return ""
        more = certain[len(self.sent) :]
        self.sent = certain
        return more

    def _decode(self) -> None:
        """Extend the text by that of whole characters."""
        stop = len(self._ids)
        while stop and self._ids[stop - 1] in self._ends:
            stop -= 1
        start, read = self._window
        if stop <= read or _BYTE.fullmatch(str(self._tokenizer.convert_ids_to_tokens(self._ids[stop - 1]))):
            return
        before, text = self._decoded(start, read), self._decoded(start, stop)
        if len(text) > len(before) and text.startswith(before) and not text.endswith(REPLACEMENT):
            self._text += text[len(before) :]
            self._window = (read, stop)

    def _decoded(self, start: int, stop: int) -> str:
        text: str = self._tokenizer.decode(self._ids[start:stop], skip_special_tokens=self._skips_special)
        return text

    def _certain(self) -> str:
        text = self._text
        end = min((_begin_of(marker, text) for marker in self._may_begin), default=len(text))
        if self._calls is None:
            return text[:end]
        if self._calls[1]:
            thought, closed, said = text.rpartition(THOUGHT_END)
            if said.lstrip()[:1] in ("", "{"):
                end = min(end, len(thought) + len(closed))
        return text[:end].rstrip()  # a call drops the spaces before it


def _begin_of(marker: str, text: str) -> int:
    """Where a marker begins in a text, or may begin, if the text ends with a part of it; else the text's length."""
    found = text.find(marker)
    if found >= 0:
        return found
    return len(text) - next((n for n in range(len(marker) - 1, 0, -1) if text.endswith(marker[:n])), 0)
