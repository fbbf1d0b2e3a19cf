"""Errors of the cluster."""

from __future__ import annotations

from chatlearn_core.exceptions import BackendError


class WorkerDiedError(BackendError):
    """The process of a worker is gone: names role, rank, process and how it ended."""

    process_is_gone = True
