"""Makes untrusted text (of rewards, plugins and data) safe to show and to write."""

from __future__ import annotations

import re

_UNPRINTABLE = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls: terminals obey them; \r and \v would overwrite or break lines
    "\u2028\u2029"  # separators: some readers end a line there
    "\u202a-\u202e\u2066-\u2069"  # bidirectional controls: they reorder what is shown around them
    "\ud800-\udfff"  # halves of surrogate pairs: no encoding has them
    "]"
)
"""Characters that a terminal obeys instead of showing, and those that UTF-8 cannot encode; newlines and tabs stay."""


def printable(text: str) -> str:
    r"""The text with each of these characters written as its escape, ``\x1b`` or ``\ud800``."""
    return _UNPRINTABLE.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    number = ord(match.group())
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"
