"""The suites fail on each mutant of the templates, in the contract test meant for it, and pass the templates."""

from __future__ import annotations

import importlib
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dataset_mutants
import environment_mutants
import generator_mutants
import logger_mutants
import numpy as np
import pytest
import reward_mutants
import sampler_mutants
import torch
import trainer_mutants
import weight_sync_mutants
from source_mutants import SourceMutant

import chatlearn_testing
from chatlearn_core.plugins.import_string import resolve_import_string
from chatlearn_core.plugins.records import Kind
from chatlearn_testing.check import Results, run_conformance
from chatlearn_testing.suites.conformance_suite import ConformanceSuite

pytestmark = pytest.mark.slow

TEMPLATES = Path(chatlearn_testing.__file__).parent / "template"
MUTANTS = (
    *dataset_mutants.MUTANTS,
    *environment_mutants.MUTANTS,
    *generator_mutants.MUTANTS,
    *logger_mutants.MUTANTS,
    *reward_mutants.MUTANTS,
    *sampler_mutants.MUTANTS,
    *trainer_mutants.MUTANTS,
    *weight_sync_mutants.MUTANTS,
)
KINDS: tuple[Kind, ...] = (
    "dataset",
    "environment",
    "generator",
    "logger",
    "reward",
    "sampler",
    "trainer",
    "weight_sync",
)
SAMPLED_KINDS: frozenset[Kind] = frozenset({"dataset", "environment", "generator", "logger", "sampler"})
HOOKS = {
    "environment": "chatlearn_environments",
    "dataset": "chatlearn_datasets",
    "logger": "chatlearn_loggers",
    "generator": "chatlearn_generators",
    "reward": "chatlearn_rewards",
    "sampler": "chatlearn_samplers",
    "trainer": "chatlearn_trainers",
    "weight_sync": "chatlearn_weight_syncs",
}
IMPORTS = """from __future__ import annotations

import asyncio
import os
import random
import subprocess
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from chatlearn_core.types import WeightShard
"""


@contextmanager
def restored_process() -> Iterator[None]:
    """Undo what mutants change for good."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    folder, dtype, variables = Path.cwd(), torch.get_default_dtype(), dict(os.environ)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        torch.set_default_dtype(dtype)
        os.chdir(folder)
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the package ``acme_plugin``, which is unloaded after the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ConformanceSuite, "patience_s", 10.0)  # mutants hang
    yield tmp_path / "acme_plugin"
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_plugin"]:
        del sys.modules[name]


def check(kind: Kind, package: Path, select: tuple[str, ...] = ()) -> Results:
    """Run the suite on the record that the package registers, with the package's own settings and model."""
    importlib.invalidate_caches()
    [record] = getattr(importlib.import_module("acme_plugin.plugin"), HOOKS[kind])()
    key = f"{kind}/{record.name}"
    settings: dict[str, Any] = {}
    if (package / "conformance.py").exists():
        settings = dict(importlib.import_module("acme_plugin.conformance").SETTINGS[key])
    load_reference, build_model = settings.pop("load_reference", None), settings.pop("build_model", None)
    model = resolve_import_string(build_model)(package.parent / "model") if build_model else None
    with restored_process():
        return run_conformance(
            [record], model_directory=model, load_reference=load_reference, settings={key: settings}, select=select
        )


@pytest.mark.parametrize("kind", KINDS)
def test_the_original_passes(kind: Kind, package: Path) -> None:
    shutil.copytree(TEMPLATES / kind / "src" / "acme_plugin", package)
    results = check(kind, package)
    assert results.conforms, "\n".join(f"{verdict.test}: {verdict.reason}" for verdict in results.of("failed"))
    passed = {verdict.test.split("[")[0] for verdict in results.of("passed")}
    assert {mutant.caught_by for mutant in MUTANTS if mutant.kind == kind} <= passed


def parameters() -> Iterator[Any]:
    """Every mutant; of ``SAMPLED_KINDS``, those after the first for a contract test are marked ``thorough``."""
    seen: set[tuple[str, str]] = set()
    for mutant in MUTANTS:
        repeats = mutant.kind in SAMPLED_KINDS and (mutant.kind, mutant.caught_by) in seen
        seen.add((mutant.kind, mutant.caught_by))
        marks = [pytest.mark.thorough] if repeats else []
        yield pytest.param(mutant, id=f"{mutant.kind}-{mutant.name}", marks=marks)


@pytest.mark.parametrize("mutant", list(parameters()))
def test_a_mutant_is_caught(mutant: SourceMutant, package: Path) -> None:
    shutil.copytree(TEMPLATES / mutant.kind / "src" / "acme_plugin", package)
    file = package / mutant.file
    source = file.read_text(encoding="utf-8")
    assert source.count(mutant.old) == 1, f"{mutant.old!r} is there {source.count(mutant.old)} times"
    changed = source.replace(mutant.old, mutant.new).replace("from __future__ import annotations\n", IMPORTS, 1)
    file.write_text(changed, encoding="utf-8")
    results = check(mutant.kind, package, (mutant.caught_by,))
    failed = [verdict for verdict in results.of("failed") if verdict.reason.startswith("call:")]
    assert {verdict.test.split("[")[0] for verdict in failed} == {mutant.caught_by}, results.output
