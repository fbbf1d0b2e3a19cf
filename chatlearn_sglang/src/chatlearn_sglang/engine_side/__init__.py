"""The code that runs in SGLang's interpreter.

It imports the standard library, torch and SGLang, and of ChatLearn only ``chatlearn_hosting.engine_side``. Every
process of the engine imports it before SGLang, because spawned processes first import the modules of their parent. On a
CPU it then installs the stand-ins for GPU packages.
"""

import os

from . import cpu_stand_ins

CPU_VARIABLE = "SGLANG_USE_CPU_ENGINE"
"""SGLang's own switch; SGLang reads it on its first import."""

if os.environ.get(CPU_VARIABLE) == "1":
    cpu_stand_ins.install()


def in_spawned_process() -> None:
    """Register the hooks; ``chatlearn_hosting`` calls this in the processes that the engine spawns."""
    from . import hooks

    hooks.register()
