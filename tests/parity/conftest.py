"""Makes the stand importable by name, for the test modules beside it and for the processes that they fork."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

NAME = "trainer_parity"

if NAME not in sys.modules:
    specification = importlib.util.spec_from_file_location(NAME, Path(__file__).with_name(f"{NAME}.py"))
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[NAME] = module
    specification.loader.exec_module(module)
