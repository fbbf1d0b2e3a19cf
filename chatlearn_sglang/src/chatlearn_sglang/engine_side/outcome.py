"""Where the ranks of an engine report how an operation ended: anonymous memory, one JSON line a rank."""

from __future__ import annotations

import json
import os


class Outcome:
    """Written by ``weight_operations.apply`` in other processes, read here when the engine has answered."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("chatlearn-outcome")

    @property
    def path(self) -> str:
        """Where other processes open it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def clear(self) -> None:
        """Forget what was reported."""
        os.ftruncate(self._descriptor, 0)

    def errors(self) -> list[str]:
        """What went wrong, one entry a rank that failed; also if no rank has reported."""
        lines = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0).splitlines()
        reports = [json.loads(line) for line in lines]
        if not reports:
            return ["no rank of the engine has reported"]
        return [f"rank {report['rank']}: {report['error']}" for report in reports if report["error"] is not None]

    def close(self) -> None:
        """Give the memory back."""
        os.close(self._descriptor)
