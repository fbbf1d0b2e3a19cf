"""Soft penalty for completions that come near the length limit."""

from __future__ import annotations

from torch import Tensor


def overlong_penalty(lengths: Tensor, *, longest: int, buffer: int) -> Tensor:
    """0 up to L − B tokens, then falling to −1 at L; −1 beyond (DAPO, arXiv 2503.14476, eq. 13).

    Args:
        lengths: [S] tokens of each completion.
        longest: L, tokens.
        buffer: B, tokens, from 1 to L.

    Returns:
        [S] float64, in [−1, 0].
    """
    return ((longest - buffer - lengths.double()) / buffer).clamp(-1.0, 0.0)
