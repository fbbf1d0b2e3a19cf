"""Disables transformers' progress bars, which would disturb a run's own display."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Disable transformers' progress bars inside the context, and restore them afterwards. Logging is unaffected."""
    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers does not annotate it
    try:
        yield
    finally:
        logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # as above
