"""Anonymous memory in which the engine's ranks report the outcome of an operation, one JSON line per rank."""

from __future__ import annotations

import json
import os


class Outcome:
    """The reports of one operation: ``weight_operations.apply`` writes them in other processes, the engine reads them
    here.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("chatlearn-outcome")

    @property
    def path(self) -> str:
        """Path under which other processes open the memory."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def clear(self) -> None:
        """Delete all reports."""
        os.ftruncate(self._descriptor, 0)

    def errors(self) -> list[str]:
        """Return one message for each rank that failed, or one message if no rank has reported."""
        lines = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0).splitlines()
        reports = [json.loads(line) for line in lines]
        if not reports:
            return ["no rank of the engine has reported"]
        return [f"rank {report['rank']}: {report['error']}" for report in reports if report["error"] is not None]

    def close(self) -> None:
        """Free the memory."""
        os.close(self._descriptor)
