"""Checks names of engine arguments against those of the installed engine."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UnknownArgumentsError(ValueError):
    """The installed engine does not take some arguments; the message has one line for each."""


def check_names(names: Iterable[str], known: Iterable[str]) -> None:
    """Check that every name is in ``known``.

    Raises:
        UnknownArgumentsError: lists every unknown name with the nearest known one.
    """
    choices = sorted(known)
    lines = []
    for name in names:
        if name not in choices:
            near = difflib.get_close_matches(name, choices, n=1)
            lines.append(f"{name}: unknown" + (f"; did you mean {near[0]!r}?" if near else ""))
    if lines:
        raise UnknownArgumentsError("\n".join(lines))
