"""Runs in SGLang's interpreter: standard library, torch and SGLang; of ours only ``chatlearn_hosting.engine_side``.

It is imported in every process of the engine before SGLang is, since the engine spawns its processes and these first
import what their parent ran. On a CPU that is where the stand-ins for GPU packages are put in place.
"""

import os

from . import cpu_stand_ins

CPU_VARIABLE = "SGLANG_USE_CPU_ENGINE"
"""SGLang's own switch, read when it is first imported."""

if os.environ.get(CPU_VARIABLE) == "1":
    cpu_stand_ins.install()


def in_spawned_process() -> None:
    """Called by ``chatlearn_hosting`` in the processes that the engine spawns."""
    from . import hooks

    hooks.register()
