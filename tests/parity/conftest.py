"""Makes the stands importable by name, for the test modules beside them and for the processes that they fork."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

for name in ("trainer_parity", "algorithm_updates"):
    if name not in sys.modules:
        specification = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert specification is not None
        assert specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        sys.modules[name] = module
        specification.loader.exec_module(module)
