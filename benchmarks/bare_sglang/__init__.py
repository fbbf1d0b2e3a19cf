"""SGLang alone, in its own interpreter: what ``generator_throughput.py`` compares the generator ``sglang`` with.

On a CPU it needs the same stand-ins for GPU packages as behind the generator, in every process, before it is imported.
"""

import importlib.util
import os

STAND_INS_VARIABLE = "BARE_SGLANG_STAND_INS"
"""Path of ``chatlearn_sglang.engine_side.cpu_stand_ins``; set where they are needed."""

if STAND_INS_VARIABLE in os.environ:
    spec = importlib.util.spec_from_file_location("cpu_stand_ins", os.environ[STAND_INS_VARIABLE])
    assert spec is not None
    assert spec.loader is not None
    stand_ins = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stand_ins)
    stand_ins.install()
