"""Loggers: destinations of metrics in addition to ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Logger(Protocol):
    """Built as ``factory(options, run_dir)``."""

    def __init__(self, options: Any, run_dir: Path) -> None: ...

    def start(self, config: Mapping[str, Any]) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...
