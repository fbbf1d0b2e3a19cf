"""Makes the mutants importable by name, since records name their code by import string."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

FIRST, LAST = "source_mutants", "template_mutants"
"""All others import the first; the last imports them."""
OTHERS = {path.stem for path in Path(__file__).parent.glob("*_mutants.py") if not path.stem.startswith("test_")}

for name in (FIRST, "mutant_groups", *sorted(OTHERS - {FIRST, LAST}), LAST):
    if name not in sys.modules:
        specification = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert specification is not None
        assert specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        sys.modules[name] = module
        specification.loader.exec_module(module)
