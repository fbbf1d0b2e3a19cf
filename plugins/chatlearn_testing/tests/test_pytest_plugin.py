"""The pytest plugin in a pytest of its own: what it costs, what it refuses, what it explains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each starts a pytest that imports torch
TAMPERED = """
from chatlearn_testing.fakes.records import FAKE_REWARD
from chatlearn_testing.suites import RewardCase, RewardConformance

CASES = (RewardCase("all", 1.0, token_ids=(1,)), RewardCase("none", 0.0, token_ids=(2,)))

class TestLenient(RewardConformance):
    backend = FAKE_REWARD
    cases = CASES
    test_odd_samples_are_marked_not_raised = None
"""
WRONG = """
from chatlearn_testing.fakes.records import FAKE_REWARD
from chatlearn_testing.suites import RewardCase, RewardConformance

class TestWrong(RewardConformance):
    backend = FAKE_REWARD
    cases = (RewardCase("all", 0.5, token_ids=(1,)), RewardCase("none", 0.0, token_ids=(2,)))
"""


def run_pytest(directory: Path, source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (directory / "test_acme.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, f"--rootdir={directory}", *arguments]
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", "-p", "chatlearn_testing.pytest_plugin", str(directory)],
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_loading_it_imports_nothing_heavy() -> None:
    code = (
        "import sys, chatlearn_testing.pytest_plugin;"
        "print([m for m in ('torch', 'numpy', 'pydantic', 'omegaconf') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "[]"


def test_a_tampered_suite_is_not_collected(tmp_path: Path) -> None:
    result = run_pytest(tmp_path, TAMPERED)
    assert result.returncode == 2, result.stdout
    assert "TestLenient removes RewardConformance.test_odd_samples_are_marked_not_raised" in result.stdout


def test_a_failure_comes_with_its_rule(tmp_path: Path) -> None:
    result = run_pytest(tmp_path, WRONG, "-k", "in_order")
    assert result.returncode == 1, result.stdout
    assert "'all' got 1.0, not 0.5" in result.stdout
    assert "contract: test_one_result_a_sample_in_order" in result.stdout
    assert "results come in the order in which workers finished" in result.stdout


HANGS = """
import time

from chatlearn_testing.fakes.records import FAKE_REWARD
from chatlearn_testing.suites import RewardCase, RewardConformance

class TestHanging(RewardConformance):
    backend = FAKE_REWARD
    cases = (RewardCase("all", 1.0, token_ids=(1,)), RewardCase("none", 0.0, token_ids=(2,)))

    @classmethod
    def setup_class(cls):
        time.sleep(1e6)
"""


def test_a_test_that_hangs_fails_and_the_others_run(tmp_path: Path) -> None:
    others = "\ndef test_other():\n    pass\n"
    result = run_pytest(tmp_path, HANGS + others, "-o", "chatlearn_suite_timeout=0.5", "-k", "in_order or other")
    assert result.returncode == 1, result.stdout
    assert "it did not end within 0.5 s; it was in " in result.stdout
    assert "test_acme.py, line " in result.stdout
    assert "1 passed" in result.stdout


def test_fixtures_and_markers(tmp_path: Path) -> None:
    source = (
        "import pytest\n"
        "@pytest.mark.engine\n"
        "def test_it(chatlearn_registry, tiny_prompts):\n"
        "    assert chatlearn_registry.entries and all(max(p) < 32 for p in tiny_prompts)\n"
    )
    result = run_pytest(tmp_path, source, "--strict-markers")
    assert result.returncode == 0, result.stdout
