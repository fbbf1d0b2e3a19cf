"""Facts about the machine that a benchmark ran on, for the JSON line that it prints last."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any


def machine_facts() -> dict[str, Any]:
    """Processor, memory and versions, read without importing torch."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": installed_version("torch"),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def cpu_model() -> str:
    """The processor's name as the kernel gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
