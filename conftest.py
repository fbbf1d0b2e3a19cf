"""What holds for every test of the repository: threads, offline hubs, and that no real engine goes untested in CI."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# Imported before any test: in importlib mode a test's module is named after its folders, and without these the folder
# chatlearn_core/ at the root would be taken for the package.
import chatlearn_core  # noqa: F401
import chatlearn_fsdp  # noqa: F401
import chatlearn_megatron  # noqa: F401
import chatlearn_sglang  # noqa: F401
import chatlearn_vllm  # noqa: F401
from chatlearn_testing.applicability import NOT_APPLICABLE

settings.register_profile("repository", deadline=None)  # a busy machine is not a failed property
settings.register_profile("fast", deadline=None, max_examples=25)  # of `make test-fast`
settings.load_profile("repository")

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Ray runs its workers at nice 15, so they would wait for the tests beside them until time limits expire.
os.environ.setdefault("RAY_worker_niceness", "0")
# A Ray that is started here asks for a token from then on, and the process cannot go back to a cluster without one; two
# that start at the same time on a new machine each write the token's file.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")


ENGINE_TIMEOUT_S = 900
"""The first test of an engine waits for its start, which takes minutes on a machine that is busy."""
OPT_IN = ("grid", "learning", "matrix", "models", "parity", "thorough")
"""Markers of tests that take too long for every change: they run when `-m` names them."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what runs on request only; skip, by name, what needs a GPU where there is none."""
    not_asked_for = [marker for marker in OPT_IN if marker not in config.option.markexpr]
    left_out = [item for item in items if any(item.get_closest_marker(marker) for marker in not_asked_for)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
    for item in items:
        if item.get_closest_marker("engine") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(ENGINE_TIMEOUT_S))
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # pytest passes by name
    """In CI a skipped engine test is a failed one, unless it needs a GPU or the conformance kit says that a contract
    does not apply to the plugin.
    """
    outcome = yield
    report = outcome.get_result()
    must_run = item.get_closest_marker("engine") and not item.get_closest_marker("gpu")
    if (
        os.environ.get("CI")
        and report.skipped
        and must_run
        and not hasattr(report, "wasxfail")
        and NOT_APPLICABLE not in str(report.longrepr)
    ):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} is marked `engine` and was skipped: {report.longrepr}"
