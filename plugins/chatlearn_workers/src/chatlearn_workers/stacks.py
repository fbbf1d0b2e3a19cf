"""Stacks of this process's threads, shown when a call times out."""

from __future__ import annotations

import sys
import threading
import traceback


def all_stacks() -> str:
    """The stacks of all threads except the calling one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    here = threading.get_ident()
    parts = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sys._current_frames().items()
        if ident != here
    ]
    return "\n".join(parts)
