"""Engine arguments, checked by name against the argument class of the vLLM that is installed."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any


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


def engine_args(arguments: Mapping[str, Any]) -> Any:
    """``vllm.EngineArgs`` of these arguments.

    Raises:
        UnknownArgumentsError: the installed vLLM has no such argument.
    """
    from vllm.engine.arg_utils import EngineArgs

    check_names(arguments, (field.name for field in dataclasses.fields(EngineArgs)))
    return EngineArgs(**arguments)
