"""Where outcomes are kept, and a limit from the environment."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path


def cache_file(project: str, name: str) -> Path | None:
    """A file in the user's cache; None without a home directory."""
    with contextlib.suppress(RuntimeError):
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / project / name
    return None


def seconds(variable: str, default: float) -> float:
    """A number of seconds from the environment; ``default`` if it is none."""
    try:
        found = float(os.environ.get(variable, ""))
    except ValueError:
        return default
    return found if math.isfinite(found) else default
