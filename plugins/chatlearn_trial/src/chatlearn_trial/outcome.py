"""What became of one task in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True)
class Outcome:
    """The result of a task, or how its process was lost."""

    result: str = ""
    """What the function returned; empty if it raised."""
    lost: str = ""
    """How the process ended instead: ``did not end within 10 s; it hangs in ...``; empty if the function returned."""
    patched: tuple[str, ...] = ()
    """Functions of the standard library that it replaced: ``json.dumps``."""
    changed: tuple[str, ...] = ()
    """Other global state that it changed: ``the working directory``."""
    files: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Files of the modules that it imported, outside the standard library -> time of the last change, ns, and size."""
    until: float | None = None
    """Unix time until which the outcome may be remembered; None: as long as the files are the same."""
