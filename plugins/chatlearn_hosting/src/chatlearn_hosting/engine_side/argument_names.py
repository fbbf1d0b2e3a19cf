"""Names of engine arguments, checked against those that the installed engine takes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UnknownArgumentsError(ValueError):
    """Names that the installed engine does not take; one line each in the message."""


def check_names(names: Iterable[str], known: Iterable[str]) -> None:
    """Every name is one of ``known``.

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
