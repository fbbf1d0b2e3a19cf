"""Texts for the policy, of a bounded length."""

from __future__ import annotations


def shortened(text: str, limit: int) -> str:
    """The first ``limit`` characters, with a note if there are more. Lone surrogates, which no tokenizer can encode,
    become question marks.
    """
    if len(text) > limit:
        text = f"{text[:limit]}\n[truncated: the first {limit} of {len(text)} characters]"
    return text.encode("utf-8", "replace").decode()
