"""Source positions in a flow's code."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path

_HERE = Path(__file__).parent


def caller() -> str:
    """``file:line`` of the innermost frame outside this package, which is the flow's own line."""
    frame = sys._getframe(1)
    while frame.f_back is not None and Path(frame.f_code.co_filename).parent == _HERE:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def definition(flow: Callable[..., object]) -> str:
    """``file:line (name)`` of a function; only its name if it has no Python code."""
    function = inspect.unwrap(getattr(flow, "__func__", flow))
    code = getattr(function, "__code__", None)
    name = getattr(flow, "__qualname__", repr(flow))
    return f"{code.co_filename}:{code.co_firstlineno} ({name})" if code else name
