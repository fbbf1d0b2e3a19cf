"""The suite for rewards fails on each mutant of the template's reward, in the contract test meant for it."""

from __future__ import annotations

import importlib
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reward_mutants import MUTANTS, SourceMutant

import chatlearn_testing
from chatlearn_core.plugins.records import RewardSpec
from chatlearn_testing.check import run_conformance

SOURCE = Path(chatlearn_testing.__file__).parent / "template" / "reward" / "src"
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
"""


@pytest.fixture(scope="module")
def template() -> Iterator[tuple[RewardSpec, dict[str, Any]]]:
    """The template's record and settings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SOURCE))
        plugin = importlib.import_module("acme_plugin.plugin")
        settings = importlib.import_module("acme_plugin.conformance").SETTINGS["reward/acme"]
        [record] = plugin.chatlearn_rewards()
        yield record, dict(settings)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("acme_plugin", "acme_mutant")]:
        del sys.modules[name]


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


def check(record: RewardSpec, settings: dict[str, Any], select: list[str] | None = None) -> Any:
    return run_conformance([record], settings={f"reward/{record.name}": settings}, select=select or ())


def test_the_original_passes(template: tuple[RewardSpec, dict[str, Any]]) -> None:
    results = check(*template)
    assert results.conforms, "\n".join(f"{verdict.test}: {verdict.reason}" for verdict in results.of("failed"))
    assert {mutant.caught_by for mutant in MUTANTS} <= {verdict.test for verdict in results.of("passed")}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught(
    mutant: SourceMutant,
    template: tuple[RewardSpec, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record, settings = template
    source = (SOURCE / "acme_plugin" / "reward.py").read_text(encoding="utf-8")
    assert source.count(mutant.old) == 1, f"{mutant.old!r} is there {source.count(mutant.old)} times"
    changed = source.replace(mutant.old, mutant.new).replace("from __future__ import annotations\n", IMPORTS, 1)
    module = f"acme_mutant_{mutant.name}"
    (tmp_path / f"{module}.py").write_text(changed, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with restored_process():
        results = check(replace(record, factory=f"{module}:AcmeReward"), settings, [mutant.caught_by])
    failed = [verdict for verdict in results.of("failed") if verdict.reason.startswith("call:")]
    assert [verdict.test for verdict in failed] == [mutant.caught_by], results.output
