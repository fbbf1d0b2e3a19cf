"""A report of a run directory, in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chatlearn_core.exceptions import ChatLearnError
from chatlearn_observe.report.write import write_report


def write(run_dir: str) -> dict[str, Any]:
    """How many bytes the page has and what it says was left out, or the sentence that refuses the directory."""
    try:
        report = write_report(Path(run_dir))
    except ChatLearnError as error:
        return {"refused": str(error)}
    return {"bytes": report.path.stat().st_size, "notes": list(report.notes)}
