"""Where the threads of this process are: what a timeout shows."""

from __future__ import annotations

import sys
import threading
import traceback


def all_stacks() -> str:
    """The stack of every thread, the calling one left out."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    here = threading.get_ident()
    parts = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sys._current_frames().items()
        if ident != here
    ]
    return "\n".join(parts)
