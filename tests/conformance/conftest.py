"""Makes the mutants importable by name, since records name their code by import string."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

NAMES = (
    "source_mutants",
    "aggregation_mutants",
    "algorithm_mutants",
    "cli_command_mutants",
    "conformance_mutants",
    "dataset_mutants",
    "decision_mutants",
    "mutant_groups",
    "engine_mutants",
    "environment_mutants",
    "example_kind_mutants",
    "flow_method_mutants",
    "generator_mutants",
    "launcher_mutants",
    "logger_mutants",
    "model_family_mutants",
    "output_mutants",
    "reader_mutants",
    "reward_mutants",
    "sampler_mutants",
    "tool_mutants",
    "trainer_mutants",
    "weight_sync_mutants",
)
"""In the order in which they import each other."""

for name in NAMES:
    if name not in sys.modules:
        specification = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert specification is not None
        assert specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        sys.modules[name] = module
        specification.loader.exec_module(module)
