"""What runs in SGLang's interpreter: standard library, torch and SGLang; of ours only ``hosting.engine_side``.

It is imported in every process of the engine before SGLang is, since the engine spawns its processes and these first
import what their parent ran. On a CPU that is where the stand-ins for GPU packages are put in place, and in the spawned
processes where the hook is registered that brings requests their seeds.
"""

import os
import sys

from . import cpu_stand_ins

CPU_VARIABLE = "SGLANG_USE_CPU_ENGINE"
"""SGLang's own switch, read when it is first imported."""

if os.environ.get(CPU_VARIABLE) == "1":
    cpu_stand_ins.install()

if "__mp_main__" in sys.modules:  # a process that the engine spawned
    from . import seeds

    seeds.register()
